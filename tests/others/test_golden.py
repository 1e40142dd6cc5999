"""NVIDIA's logged rows: how near the prediction is, what each pair says, bad files."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from statistics import median
from zipfile import ZipFile

import pytest

from actmem.config import ConfigError
from actmem_course.others import table_rows
from actmem_course.others.golden import (
    AS_LOGS,
    LATE_PLAYS,
    LIMITS,
    NEAR,
    GoldenRow,
    equal_by_code,
    equalities,
    experiments,
    predict,
    read_golden,
)
from actmem_course.others.megatron_memory import NOT_MODELLED, SOURCES, MegatronRun, Trace
from actmem_course.show.tables import golden_summary

RESULTS = [predict(row) for row in read_golden()]
UNFUSED = list(LIMITS)[:1]
PAPER = "hidden-size=512 num-layers=12 num-attention-heads=8 seq-length=1024 micro-batch-size=4 "
PAPER += "attention-backend=unfused "


def prose(name):
    return " ".join((Path(__file__).parents[2] / name).read_text(encoding="utf-8").split())


def test_the_findings_have_these_numbers():
    text = prose("FINDINGS.md")
    played = [r for r in RESULTS if r.played]
    assert {r.why_not.split(":")[0] for r in RESULTS if not r.played} <= {*NOT_MODELLED, "gpus"}
    assert f"{len(played)} of {len(RESULTS)} logged peaks" in text
    assert f"{len(played)} of {len(RESULTS)} of NVIDIA's predicted" in prose("README.md")
    for kind, words in zip(
        LIMITS,
        (
            "| dense, unfused attention | {} | {:.3f}% | {:.3f}% |",
            "| dense, flash or cuDNN attention | {} | {:.3f}% | {:.3f}% |",
            "| experts or latent attention | {} | {:.3f}% | {:.3f}% |",
        ),
        strict=True,
    ):
        off = [abs(r.peak_percent) for r in played if r.row.kind == kind]
        assert max(off) <= LIMITS[kind]
        assert words.format(len(off), max(off), median(off)) in text
    dense = [r for r in played if r.row.kind in UNFUSED]
    held = [abs(r.held_percent) for r in dense]
    assert f"at rest is {max(held):.3f}% off at worst, the median {median(held):.3f}%" in text
    assert f"Of the {len(dense)}, {sum(abs(r.peak_percent) <= 0.02 for r in dense)} are within 0.02%" in text
    rows, apart = zip(*equal_by_code(played))
    said = f"{sum(rows)} runs in {len(rows)} groups are equal by the code; their logs are {min(apart):.2f} to {max(apart):.2f}% apart"
    assert said in text
    found = experiments(RESULTS)
    verdicts = Counter("0 B" if not e.apart_bytes else e.verdict for e in found)
    known = len(found) - sum(verdicts[verdict] for verdict in ("0 B", AS_LOGS, "open"))
    assert (
        f"Of {len(found)} pairs that differ in one thing, {verdicts['0 B']} fit to the byte, {known} up to known remainders, "
        f"{verdicts[AS_LOGS]} {AS_LOGS}, and {verdicts['open']} are open" in text
    )
    both = [r.row for r in played if r.row.kind in list(LIMITS)[:2]]
    logged = [100 * row.logs_apart[0] / row.held_bytes for row in both if row.logs_apart[0]]
    logs = f"{len(logged)} dense runs have logs of other commits or containers, up to {max(logged):.2f}% apart at rest"
    assert f"{logs}, the median {median(logged):.2f}%" in text


def test_a_pair_that_no_formula_explains_may_be_as_far_apart_as_its_tests_own_logs():
    found = [e for e in experiments(RESULTS) if e.apart_bytes and e.verdict in ("open", AS_LOGS)]
    for e in found:
        logs = e.more.row.logs_apart[1] + e.less.row.logs_apart[1]
        assert (abs(e.apart_bytes) <= logs) == (e.verdict == AS_LOGS)
    named = {(row["case"], row["gpu"]) for row in table_rows("golden_logs.tsv")}
    assert named <= {(r.row.case, r.row.gpu) for r in RESULTS if r.row.kind in list(LIMITS)[:2] or "mla" in r.row.case}


@pytest.mark.nightly
def test_the_findings_say_how_many_rows_fit_if_blocks_come_back_late():
    far = [r for r in RESULTS if r.played and r.row.kind in list(LIMITS)[:2] and abs(r.held_percent) > NEAR]
    fit = sum(r.fits_if_late for r in far)
    said = f"{len(far)} dense runs are more than {NEAR}% off at rest; {fit} of them fit one of {LATE_PLAYS} replays"
    assert said in prose("FINDINGS.md")


def test_a_block_that_came_back_late_explains_a_mebibyte_at_rest():
    (row,) = [r for r in RESULTS if r.row.case.endswith("te_tp1_pp4_vp1") and r.row.gpu == "a100"]
    assert abs(row.held_percent) > NEAR and row.fits_if_late


def test_rows_with_experts_lack_tokens_and_never_have_too_many():
    surplus = [r.surplus_percent for r in RESULTS if r.reason == "num-experts" and r.surplus_percent is not None]
    assert len(surplus) == 26 and min(surplus) > -0.1 and sum(percent < 11 for percent in surplus) == 25


def test_where_no_block_depends_on_chance_peak_and_rest_are_right():
    settled = [r for r in RESULTS if r.reason == "nothing sent"]
    assert len(settled) == 13
    assert all(abs(off) < 0.001 for r in settled for off in (r.peak_percent, r.held_percent))


def test_most_rows_hold_beyond_their_resting_state_what_the_formulas_say_to_the_byte():
    apart = [
        r.row.peak_bytes - r.row.held_bytes - r.predicted_peak_bytes + r.predicted_held_bytes
        for r in RESULTS
        if r.played and r.row.kind in UNFUSED
    ]
    assert sum(difference == 0 for difference in apart) >= 24


def test_every_line_names_what_it_was_read_from():
    assert all(set(r.played.memory.peak_lines) <= SOURCES.keys() for r in RESULTS if r.played)
    assert all(":" in source or source.startswith("c10/") or "/" in source for source in SOURCES.values())


def test_a100s_logged_one_layer_recomputation_and_interleaving_as_the_paper_has_them():
    """34sbh + 5as²b + 16sb; for 12 layers all of that but 2sbh; 9 layers in flight for 3, and six blocks of one number."""
    s, b, h, a = 1024, 4, 512, 8
    layer = 34 * s * b * h + 5 * a * s**2 * b + 16 * s * b
    sizes = [layer, 12 * (layer - 2 * s * b * h), 6 * layer - 3 * 2 * s * b * h]
    # Eight freed outputs leave one number each; two scalars of a loss are not there.
    logged = [*sizes[:2], sizes[2] + (8 - 2) * 512]
    assert [both for _, *both in equalities()] == [[formula, there] for formula, there in zip(sizes, logged)]
    assert {*logged} <= {e.logged_bytes for e in experiments(RESULTS) if not e.apart_bytes}
    first = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    assert all(first.count(f"{size:,} B") == 2 for size in sizes[:2])


def test_at_least_a_dozen_pairs_are_explained():
    found = experiments(RESULTS)
    explained = [e for e in found if e.verdict not in ("open", AS_LOGS)]
    assert len(explained) >= 16 and sum(not e.apart_bytes for e in found) >= 12
    assert {e.thing for e in explained} >= {"layers", "recomputation", "interleaving", "tensor parallelism", "GPU"}
    assert all(e.apart_bytes == e.logged_bytes - e.formula_bytes for e in found)


def test_pairs_differ_in_one_thing_only():
    def row(case, more="", held=10**9, gpu="a100"):
        return predict(GoldenRow(case, gpu, PAPER + "global-batch-size=32 " + more, 10**10, held))

    three, two = "pipeline-model-parallel-size=4", "pipeline-model-parallel-size=4 decoder-last-pipeline-num-layers=2"
    assert [e.thing for e in experiments([row("x", three), row("y", two)])] == ["layers"]
    assert not experiments([row("x", three), row("y", two + " swiglu=true")])
    assert not experiments([row("x", three), row("y", three + " unheard-of=1")])


def active(**changed):
    arguments = {"global-batch-size": 64, "tensor-model-parallel-size": 2, "sequence-parallel": "true"} | changed
    words = PAPER + " ".join(f"{name.replace('_', '-')}={value}" for name, value in arguments.items())
    return Trace(MegatronRun(words, "h100")).play(3)


EXPERTS = PAPER + "global-batch-size=32 num-experts=4 moe-router-topk=1 tensor-model-parallel-size=2 "


def test_an_expert_keeps_its_tokens_three_mlp_tensors_and_what_index_add_reads():
    """Each token of b·s/t·(t·ep) picked by half of the experts: 2h in, 2·4h/t three times, 2h out."""
    words = EXPERTS + "sequence-parallel=true expert-model-parallel-size=2 disable-bias-linear=true "
    many, few = (Trace(MegatronRun(words + f"num-layers={n}", "h100", 8, {"deterministic"})).play() for n in (12, 8))
    kept = {line: (size - few.memory.peak_lines[line]) // 4 for line, size in many.memory.peak_lines.items()}
    tokens, h = 1024 * 4, 512
    assert kept["MLP"] == 3 * 2 * tokens * 4 * h // 2 and kept["experts' inputs and outputs"] == 2 * 2 * tokens * h
    spread = Trace(MegatronRun(words + "num-layers=12 moe-token-dispatcher-type=alltoall", "h100")).play()
    assert spread.memory.peak_lines["experts' inputs and outputs"] == 12 * 2 * tokens * h


def test_a_ring_adds_the_outputs_of_its_turns_in_16_bits(monkeypatch):
    words = "global-batch-size=32 attention-backend=flash attention-dropout=0 kv-channels=48 context-parallel-size=2"
    played, sizes, output = Trace(MegatronRun(f"{PAPER} {words}", "a100")), Counter(), 2 * 1024 * 4 // 2 * 8 * 48
    take = played.take

    def noted(line, size):
        sizes[line, size] += 1
        return take(line, size)

    monkeypatch.setattr(played, "take", noted)
    played.play(1)
    layers = 12 * played.run.microbatches
    assert sizes["transient", 2 * output] == 0 and sizes["keys and values of the ring", 2 * output] == 2 * layers
    # Two turns of forward; backward's gradients of Q, K, V and of the projection's input.
    assert sizes["transient", output] == (2 + 3 + 1) * layers


def test_the_rows_are_read_from_an_archive_too(tmp_path):
    """As a page loads them."""
    sources = Path(__file__).parents[2] / "src"
    with ZipFile(tmp_path / "all.zip", "w") as archive:
        for kind in ("actmem/**/*.py", "actmem_course/__init__.py", "actmem_course/others/*"):
            for file in sources.glob(kind):
                archive.write(file, file.relative_to(sources))
    code = "from actmem_course.others.golden import GOLDEN, read_golden; print(GOLDEN, len(read_golden()))"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "all.zip")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == [str(tmp_path / "all.zip/actmem_course/others/golden.tsv"), "132"], done.stderr


def lines(played, *names):
    return [played.memory.peak_lines[name] for name in names]


def test_a_layer_on_two_ranks_with_sequence_parallelism_keeps_the_papers_bytes():
    few, many = active(num_layers=8), active(num_layers=12)
    kept = {line: size - few.memory.peak_lines[line] for line, size in many.memory.peak_lines.items()}
    names = ["norm inputs", "norm outputs", "Q, K, V", "softmax outputs", "attention dropout", "attention outputs"]
    names += ["dropout masks", "MLP"]
    sbh, as2b = 1024 * 4 * 512, 8 * 1024**2 * 4
    assert sum(kept[name] for name in names) == 4 * (34 * sbh + 5 * as2b) // 2
    assert kept["norm statistics"] == 4 * 16 * 1024 * 4 // 2


def test_what_a_run_holds_is_18_bytes_a_parameter_or_6_and_a_share_of_12():
    plain, sharded = active(), active(use_distributed_optimizer="true")
    states = ("weights", "main gradients", "main parameters", "Adam's moments")
    weights, gradients, main, moments = lines(plain, *states)
    assert gradients == main and moments == 2 * main and weights == gradients // 2
    assert sum(lines(sharded, *states)) < sum(lines(plain, *states)) * (6 + 12 / 4 + 0.1) / 18
    assert plain.peaks[0] < plain.peaks[1] == plain.peaks[2] and plain.held[1] == plain.held[2]


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, "cannot read"),
        ("case\tgpu\n", "has no column arguments"),
        ("\ufeffcase\tgpu\targuments\n", "has no rows"),
        ("case\tgpu\targuments\nx\t\ty=1\n", "line 2: case, gpu and arguments can't be empty"),
        ("case\tgpu\targuments\tpeak_bytes\nx\ta100\ty=1\t-3\n", "line 2: peak_bytes must be a whole number"),
        ("case\tgpu\targuments\tpeak_bytes\nx\ta100\ty=1\t0\n", "line 2: peak_bytes must be a whole number"),
        ("case\tgpu\targuments\tgpus\nx\ta100\ty=1\t" + 5000 * "9", "line 2: gpus must be a whole number"),
        ("case\tgpu\targuments\nx\ta100\t" + 200_000 * "y", "field larger than field limit"),
    ],
)
def test_a_bad_table_is_named(text, expected, tmp_path):
    path = tmp_path / "rows.tsv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match="rows") as caught:
        read_golden(path)
    assert expected in str(caught.value)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("mtp-num-layers=1", "mtp-num-layers: not modelled"),
        (EXPERTS + "expert-model-parallel-size=3", "gpus: 8 can't hold p · experts' t · ep = 6"),
        ("hidden-size=512", "num-attention-heads: must be given"),
        (PAPER, "global-batch-size: must be given"),
        (PAPER + "global-batch-size=32 tensor-model-parallel-size=3", "gpus: 8 can't hold"),
        (PAPER + "global-batch-size=0", "global-batch-size: must be given as a whole number above 0"),
        (PAPER + "global-batch-size=32 recompute-granularity=selective", "recompute-granularity: not modelled"),
        (PAPER + "global-batch-size=" + 5000 * "9", "global-batch-size: must be given as a whole number above 0"),
        (PAPER + "global-batch-size=320032", "microbatches: must be at most 10000, got 10001"),
        (PAPER.replace("layers=12", "layers=10001") + "global-batch-size=32", "num-layers: must be at most 10000, got"),
        (
            PAPER + "global-batch-size=32 pipeline-model-parallel-size=2 decoder-last-pipeline-num-layers=13",
            "decoder-last-pipeline-num-layers: must be at most 12, got 13",
        ),
        # Without a microbatch a run would hold no activation at all.
        (
            PAPER + "global-batch-size=1",
            "global-batch-size: 1 must be divisible by micro-batch-size · data-parallel ranks",
        ),
        (
            PAPER + "global-batch-size=32 num-layers=13 pipeline-model-parallel-size=4",
            "num-layers with embedding and loss: 15",
        ),
        (
            PAPER + "global-batch-size=32 ffn-hidden-size=2049 tensor-model-parallel-size=2",
            "ffn-hidden-size: 2049 must",
        ),
        (PAPER.replace("heads=8", "heads=7") + "global-batch-size=32", "hidden-size: 512 must be divisible by"),
        (
            PAPER + "global-batch-size=32 num-experts=3 expert-model-parallel-size=2",
            "num-experts: 3 must be divisible by",
        ),
        (
            PAPER + "global-batch-size=32 num-query-groups=3 group-query-attention=true",
            "num-attention-heads: 8 must be",
        ),
    ],
)
def test_what_cannot_be_predicted_says_why(arguments, expected):
    result = predict(GoldenRow("x", "a100", arguments, 10**9, 10**9))
    assert result.predicted_peak_bytes is None and expected in result.why_not


def test_an_argument_that_nobody_reads_is_named():
    other = predict(GoldenRow("x", "a100", PAPER + "global-batch-size=32 swiglu=true unheard-of=1 adam-beta1=0.9"))
    assert other.ignored == ["unheard-of"]
    assert "arguments taken as if they were off: unheard-of (1)" in golden_summary([other], [])
    assert not predict(GoldenRow("x", "a100", PAPER + "global-batch-size=32")).ignored
    known = {"overlap-moe-expert-parallel-comm", "hierarchical-context-parallel-sizes", "rotary-interleaved"}
    assert {name for r in RESULTS for name in r.ignored} == known | {"use-transformer-engine-op-fuser"}
