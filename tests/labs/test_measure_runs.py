"""Published runs as a user starts it: tables, JSON, rows of one's own, bad input in one line."""

import importlib.util
import json

import pytest

from actmem.config import PAPER_MODELS
from actmem.formulas.activations import TABLE2
from actmem_course.bench.predictors import b200_errors, b200_reserved, kernel_slopes, leaderboard
from actmem_course.others.golden import GOLDEN, LAYERS_AND_HEAD
from actmem_course.others.published import LLAMA3_RUNS, NANOTRON_RUNS
from tests.labs.in_process import lab_refusal, shown_in_80_columns

SCRIPT = "measure_runs.py"
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None


def test_all_runs_as_a_table_json_and_a_page(tmp_path):
    path, page = tmp_path / "runs.json", tmp_path / "runs.html"
    shown_in_80_columns(SCRIPT, "--json", path, "--html", page)
    results = json.loads(path.read_text(encoding="utf-8"))
    nanotron = [result for result in results if result.get("framework") == "nanotron"]
    times = [result for result in results if "source" in result]
    choices = [result for result in results if "behind_percent" in result]
    assert len(choices) >= len(PAPER_MODELS) + len(LLAMA3_RUNS) + 8
    assert len(times) >= 2 * len(PAPER_MODELS) + len(LLAMA3_RUNS)
    assert len(nanotron) == len(NANOTRON_RUNS) == 18
    assert all(abs(result["difference_percent"]) < 0.1 and result["within_limit"] for result in nanotron)
    assert "plotly" in page.read_text(encoding="utf-8")


def test_rows_of_ones_own_come_back_with_a_prediction(tmp_path):
    rows, out = tmp_path / "rows.json", tmp_path / "out.json"
    given = [
        {"gpus": 16, "dp": 1, "tp": 1, "pp": 16, "mbz": 2, "peak_allocated_mib": 22941.07, "who": "kept"},
        {"gpus": 8, "dp": 8, "tp": 1, "pp": 1, "mbz": 4},
    ]
    rows.write_text(json.dumps(given))
    shown_in_80_columns(SCRIPT, "--rows", rows, "--json", out)
    found = json.loads(out.read_text())
    assert [{k: v for k, v in one.items() if k != "predicted_mib"} for one in found] == given
    assert abs(found[0]["predicted_mib"] / 22941.07 - 1) < 0.001 and found[1]["predicted_mib"] > 0


def test_public_calculators_beside_counted_bytes(tmp_path):
    out = tmp_path / "out.json"
    shown = shown_in_80_columns(SCRIPT, "--calculators", "--json", out)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert {one["predictor"] for one in found if "predictor" in one} >= {"ours", "SimuMax"}
    assert [one["by_formula"] for one in found if "kernel" in one] == [785_928, 186_880]
    for name in {one["calculator"] for one in found if "calculator" in one} - {"ours"}:
        own = [one for one in found if one.get("calculator") == name and one["row"] in {row.name for row in TABLE2}]
        assert len(own) == len(TABLE2)
        right = sum(one["printed_bytes"] == one["counted_bytes"] for one in own)
        assert f"{name}: {right} of {len(TABLE2)} rows to the byte" in shown
    assert "SimuMax" in shown and shown.count("785,928") == 2 and shown.count("186,880") == 3


def test_two_kernels_are_counted_as_an_a100_logged_them():
    for slope in kernel_slopes():
        assert slope.counted == slope.by_formula and abs(slope.logged - slope.by_formula) < 0.1


def test_llama_on_b200s_is_predicted_two_hundred_times_nearer_than_by_its_own_simulator():
    ours, simumax = b200_errors()
    assert len(ours) == len(simumax) == 15 and max(map(abs, ours)) < 0.0014
    assert sum(map(abs, ours)) * 200 < sum(map(abs, simumax))


def test_what_an_allocator_reserves_is_predicted_within_four_percent_on_b200s():
    layouts = b200_reserved()
    assert len(layouts) == 15 and all(ours > logged for logged, _, ours in layouts)
    assert max(abs(ours / reserved - 1) for _, reserved, ours in layouts) < 0.037
    explained = sum(ours - peak for peak, _, ours in layouts) / sum(reserved - peak for peak, reserved, _ in layouts)
    assert 0.65 < explained < 0.67  # the rest: streams of their own


def test_the_leaderboard_begins_with_the_least_error():
    lines = leaderboard()
    means = [line.mean_percent for line in lines]
    assert means == sorted(means) and all(0 < line.mean_percent <= line.worst_percent for line in lines)
    assert max(line.mean_percent for line in lines if line.predictor == "ours") < 1


def test_nvidias_rows_come_back_with_a_prediction(tmp_path):
    rows, out = tmp_path / "rows.tsv", tmp_path / "out.json"
    own = GOLDEN.read_text(encoding="utf-8").splitlines()
    some = [own[0], *(line for line in own if "_tp1_pp4_" in line and "vp2" not in line)]
    rows.write_text("\n".join([*some, "moe/x\th100\t100\t50\t90\tmtp-num-layers=1"]) + "\n", encoding="utf-8")
    shown = shown_in_80_columns(SCRIPT, "--megatron", "--rows", rows, "--json", out)
    found = json.loads(out.read_text(encoding="utf-8"))
    assert len(found) == len(some) and found[-1]["predicted_peak_bytes"] is None
    assert "not modelled" in found[-1]["why_not"]
    for one in found[:-1]:
        assert abs(one["predicted_peak_bytes"] / one["peak_bytes"] - 1) < 0.003
        assert sum(one["lines"].values()) == one["predicted_peak_bytes"]
    assert "1 rows not modelled" in shown and "239,140,864" in shown
    pairs = [pair for one in found for pair in one["pairs"]]
    assert f"{len(pairs)} pairs: " in shown and 239_140_864 in [pair["logged_bytes"] for pair in pairs]


def test_rows_that_nobody_logged_show_their_prediction_and_others_why_there_is_none(tmp_path):
    rows, out = tmp_path / "rows.tsv", tmp_path / "out.json"
    heading, *own = GOLDEN.read_text(encoding="utf-8").splitlines()
    case, gpu, *_, arguments = next(line for line in own if "tp1_pp4_vp1_uneven_pipeline\ta100" in line).split("\t")
    lines = ["case\tgpu\targuments", f"{case}\t{gpu}\t{arguments}", f"x\ttpu\t{arguments}"]
    rows.write_text("\n".join(lines))
    shown = shown_in_80_columns(SCRIPT, "--megatron", "--rows", rows, "--json", out)
    one = json.loads(out.read_text(encoding="utf-8"))[0]
    table, _, reasons = shown.partition("Why a prediction is off")
    assert f"{one['predicted_peak_bytes']:,} " in table and f"{one['predicted_held_bytes']:,} " in table
    assert "gpu: must be one of a100" in " ".join(reasons.split()) and "more GPUs" not in reasons


def test_nvidias_models_are_counted_on_this_machine(tmp_path):
    """Line by line the count and the run as played differ for stated reasons, which add up to what was logged."""
    rows, out = tmp_path / "rows.tsv", tmp_path / "out.json"
    heading, *own = GOLDEN.read_text(encoding="utf-8").splitlines()
    kept = ("no_mmap_bin_files\ta100", "uniform_full_recompute", "tp1_pp4_vp1_uneven_pipeline\ta100", "swiglu")
    rows.write_text("\n".join([heading, *(line for line in own if any(name in line for name in kept))]))
    shown = shown_in_80_columns(SCRIPT, "--megatron", "--here", "--rows", rows, "--json", out)
    found = {one["case"]: one for one in json.loads(out.read_text(encoding="utf-8"))}
    assert len(found) == 4 and not any("swiglu" in case for case in found)
    for one in found.values():
        assert one["open_bytes"] == 0 and one["logged_bytes"] == sum(one["on_gpu"].values())
        for line in (LAYERS_AND_HEAD, "logits, 16 bits", "logits, float32"):
            assert one["counted"][line] == one["on_gpu"][line]
    assert "4 rows: 4 explained to the byte" in shown
    theirs = (
        "in 3 of 3 rows all they add is dropout's masks" if HAS_MEGATRON else "megatron-core's layers: not installed"
    )
    assert theirs in " ".join(shown.split())


def test_a_run_that_is_far_off_is_exit_code_1(tmp_path):
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([{"gpus": 8, "dp": 8, "tp": 1, "pp": 1, "mbz": 4, "peak_allocated_mib": 1000}]))
    assert "0 of 1 runs within" in shown_in_80_columns(SCRIPT, "--rows", rows, code=1)


RUN = {"gpus": 8, "dp": 8, "tp": 1, "pp": 1, "mbz": 4}
BAD = {
    "no file": (None, "--rows: cannot read"),
    "no JSON": ("{", "--rows: "),
    "no list": ("{}", "must hold a list of objects"),
    "no size": ('[{"gpus": 8}]', "--rows: object 0 has no dp"),
    "other devices": (json.dumps([RUN | {"gpus": 9}]), "--rows: object 0: gpus: must be dp · tp · pp = 8, got 9"),
    "text": (json.dumps([RUN | {"mbz": "4"}]), "rows, object 0: mbz: must be a whole number, got '4'"),
    "a size no run has": (json.dumps([RUN | {"tp": 3, "gpus": 24}]), "object 0: num_attention_heads: 32 must be"),
    "a batch no run has": (json.dumps([RUN | {"mbz": 3}]), "object 0: global_batch_size: 1024 must be divisible by"),
    "a peak that is none": (json.dumps([RUN | {"peak_allocated_mib": True}]), "peak_allocated_mib must be a number"),
    "a peak without end": (
        '[{"gpus":8,"dp":8,"tp":1,"pp":1,"mbz":4,"peak_allocated_mib":1e999}]',
        "must be a number above 0",
    ),
    "a peak of no number": (
        '[{"gpus":8,"dp":8,"tp":1,"pp":1,"mbz":4,"peak_allocated_mib":NaN}]',
        "must be a number above 0",
    ),
    "a long peak": (json.dumps([RUN | {"peak_allocated_mib": 10**400}]), "must be a number above 0"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_code_2(case, tmp_path, monkeypatch, capsys):
    text, expected = BAD[case]
    path = tmp_path / "rows.json"
    if text is not None:
        path.write_text(text)
    assert expected in lab_refusal(SCRIPT, ["--rows", path], monkeypatch, capsys)
