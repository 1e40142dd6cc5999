"""Tapes solved from tiny runs say what real runs of foreign models keep and need, at sizes and numbers of blocks not seen."""

import inspect
import json
import random
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from actmem.config import ConfigError, ModelShape
from actmem.formulas.activations import layer_rows
from actmem.ledger.recorder import record
from actmem.recipes import PAPER_LAYER
from actmem.rows import total
from actmem_more.gpu_kernels import gpu_kernels_on_cpu
from actmem_tools.load_model import tensors_for
from actmem_tools.tape.evaluate import BACKWARD, Event, Make, Mark, Run, Tape, moments, read_events, sizes_of, value
from actmem_tools.tape.extrapolate_blocks import LOSS_CODE, adapter_code, recompute_code
from actmem_tools.tape.model_tape import model_tape, run_factory, solved_blocks, solved_target, tape_of
from actmem_tools.tape.record import GENERATOR_STATE
from actmem_tools.tape.solver import NoFormula, Runs, draw_sizes, parsed_letters, solve
from actmem_tools.tape.tape_command import main
from tests.models_of_others import HUGGING_FACE, LETTERS, Of
from tests.models_of_others import MODELS as MODELS_OF_OTHERS
from tests.tape import models_for_tapes
from tests.tiers import at_night, sampled

MODELS = Path(models_for_tapes.__file__)


def said(reading):
    """All that a reading says, but the rows."""
    return reading.kept_bytes, reading.peak_bytes, reading.flops, reading.moved_bytes


def test_a_checkpoints_generator_state_counts_as_the_ledger_counts_it():
    events = run_factory(models_for_tapes.checkpointed, {"s": 8, "b": 2, "h": 8, "f": 12})
    model, (x,) = models_for_tapes.checkpointed(8, 2, 8, 12)
    with record(model) as ledger:
        y = model(x)
    kept = {row.term: row.bytes for row in read_events(events).kept_rows}
    assert y.requires_grad and kept[GENERATOR_STATE] == ledger.by_kind()[GENERATOR_STATE] > 0


@pytest.mark.parametrize(("name", "says"), [("positive", ("index", "s=")), ("by_length", ("s=", "relu"))])
def test_what_has_no_formula_is_refused_by_name_with_two_sizes(name, says):
    with pytest.raises(NoFormula) as refused:
        model_tape(f"{MODELS}:{name}", ["s", "b", "h"])
    assert all(word in str(refused.value) for word in says) and str(refused.value).count("s=") == 2
    assert "\n" not in str(refused.value)


def catches(m, x):
    try:
        m["fails"](x)
    except RuntimeError:
        return checkpoint(m["block"], x.exp(), use_reentrant=False, preserve_rng_state=False)


def test_what_runs_has_the_name_of_the_module_or_node_that_runs_it():
    """Also after a module that an exception left, as each does that a checkpoint's second run has no more need of."""
    parts = {"fails": Of(lambda m, x: x.view(3, 5, 7)), "block": nn.Sequential(nn.Linear(4, 4), nn.Tanh())}
    events = run_factory(lambda: (Of(catches, **parts), (torch.ones(2, 4, requires_grad=True),)), {})
    names = [f"{event.where}: {event.op}" for event in events if isinstance(event, Run)]
    forward = [": exp", "parts.block.0: addmm", "parts.block.1: tanh", ": sum"]
    assert names[:4] == forward and names[5:8] == [*forward[1:3], "TanhBackward0: tanh_backward"]


def test_rows_of_a_size_of_1_have_names_of_their_own():
    def other_at_1(b, h):
        run = lambda m, x: m["last"]((x.sin() if len(x) == 1 else x.exp() * 2 + x.cos()).sin())  # noqa: E731
        return Of(run, last=nn.Linear(h, h)), (torch.ones(b, h, requires_grad=True),)

    tape = tape_of(other_at_1, Runs(["b", "h"]))
    for sizes in ({"b": 1, "h": 8}, {"b": 2, "h": 8}):
        model, inputs = other_at_1(**sizes)
        with record(model) as ledger:
            y = model(*inputs)
        kept = {row.name: row.bytes for row in ledger.saved if row.kind != "input"}
        assert y.requires_grad and kept.items() <= {row.term: row.bytes for row in tape.at(sizes).kept_rows}.items()


def padded(s, h):
    return Of(lambda m, x: m["l"](F.pad(x, (0, 0, 0, -len(x) % 64))).sin(), l=nn.Linear(h, h)), (torch.ones(s, h),)


def rounded(s, b, h):
    f = -(-8 * h // 3 // 256) * 256  # as Llama's first code has it
    return nn.Sequential(nn.Linear(h, f), nn.SiLU(), nn.Linear(f, h)), (torch.ones(b, s, h),)


@pytest.mark.parametrize(("factory", "says"), [(padded, "pad"), (rounded, "addmm")])
def test_a_size_that_is_rounded_up_is_refused(factory, says):
    with pytest.raises(NoFormula, match=rf"don't hold at s=257, .*{says}.* by formula, .* in a run"):
        tape_of(factory, Runs(list(inspect.signature(factory).parameters)))


#: Models of others that have no formula, and what the refusal names.
REFUSED = {
    "beit": "relative_position_bias",  # the first run of each size makes a table that later ones find
    "lstm": "mkldnn_rnn_layer",  # the workspace of this kernel grows in steps
}


#: Beside the models of others: odd sizes, checkpoints.
WRITTEN_HERE = {"odd_mlp": "s,b,h:4,f", "next_token": "s,b,h,v", "checkpointed": "s,b,h,f"}
ALL_LETTERS = LETTERS | WRITTEN_HERE
FACTORIES = MODELS_OF_OTHERS | {name: getattr(models_for_tapes, name) for name in WRITTEN_HERE}


@pytest.mark.parametrize("name", sampled(FACTORIES, 0, always=("squeeze", "recommender", *WRITTEN_HERE)))
def test_a_tape_is_a_real_run_at_larger_sizes(name):
    """Bytes, FLOPs and all else at three sizes of which each that can is twice as large as those that were solved from."""
    if name in HUGGING_FACE:
        pytest.importorskip("transformers")
    letters, rules, fixed = parsed_letters(ALL_LETTERS[name])
    factory = FACTORIES[name]
    if name in REFUSED:
        with pytest.raises(NoFormula, match=REFUSED[name]):
            tape_of(factory, Runs(letters, rules), fixed)
        return
    tape = tape_of(factory, Runs(letters, rules), fixed)
    rng = random.Random(name)
    for ones in ({}, {}, {"b": 1} if name in WRITTEN_HERE else {}):
        sizes = draw_sizes(letters, rules, rng)
        sizes |= {letter: 2 * size for letter, size in sizes.items() if letter in "sbfvic"} | ones
        with gpu_kernels_on_cpu():
            assert said(tape.at(sizes)) == said(read_events(run_factory(factory, sizes))), sizes


def test_a_tape_is_of_a_gpus_kernels():
    sizes = {"s": 64, "b": 3, "h": 48}
    read = tape_of(models_for_tapes.dropped_stack, Runs(["s", "b", "h"])).at(sizes)
    with gpu_kernels_on_cpu():
        assert said(read) == said(read_events(run_factory(models_for_tapes.dropped_stack, sizes)))
    assert read.kept_bytes < read_events(run_factory(models_for_tapes.dropped_stack, sizes)).kept_bytes


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    file = tmp_path_factory.mktemp("tape") / "odd.json"
    assert main([f"{MODELS}:odd_mlp", "--letters", "s,b,h:4,f", "--out", str(file)]) == 0
    return file


def test_the_command_reads_a_tape_without_torch(solved, tmp_path):
    out = tmp_path / "reading.json"
    command = ["tape", str(solved), "--at", "s=64,b=3,h=48,f=100", "--json", str(out)]
    code = f"import sys; sys.modules['torch'] = sys.modules['numpy'] = None; from actmem_tools.__main__ import main; sys.exit(main({command!r}))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    result = json.loads(out.read_text())
    real = read_events(run_factory(models_for_tapes.odd_mlp, {"s": 64, "b": 3, "h": 48, "f": 100}))
    assert (result["kept_bytes"], result["peak_bytes"]) == (real.kept_bytes, real.peak_bytes)
    assert sum(result["kept"].values()) == real.kept_bytes and sum(result["peak"].values()) == real.peak_bytes
    assert result["matmul_flops"] == real.flops and result["moved_bytes"] == real.moved_bytes
    assert real.flops["forward"] == 2 * 64 * 3 * 48 * (100 + 103)


def test_the_command_prints_the_papers_formula(tmp_path, capsys):
    layer, file = "tests.measure.factories_for_tests:layer", tmp_path / "layer.json"
    assert main([layer, "--letters", "s:4,b,h:8", "--out", str(file)]) == 0
    # With s = b = 1 and four heads; without the input, which is not the step's.
    shape = ModelShape(1, 1, 32, 4)
    rows = [row for row in layer_rows(shape) if row.term != PAPER_LAYER.input]
    core = total(row for row in rows if row.term in PAPER_LAYER.core)
    rest = (total(rows) - core) // shape.hidden_size
    # 8sb are the statistics, in bfloat16 on a CPU; 2 bytes are the loss.
    assert capsys.readouterr().out.splitlines()[1] == f"forward keeps {rest}sbh + {core}s²b + 8sb + 2 bytes"
    sizes = {"s": 64, "b": 3, "h": 40}
    tape = Tape.from_json(file.read_text())
    assert value(tape.kept_formula(), list(sizes.values())) == tape.at(sizes).kept_bytes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["{models}:odd_mlp"], "letters"),
        (["{models}:odd_mlp", "--letters", "s,b,h,f"], "out"),
        (["{models}:odd_mlp", "--letters", "s,b,hh", "--out", "{new}"], "letters"),
        (["{models}:odd_mlp", "--letters", "s:b,b:s", "--out", "{new}"], "multiples of each other"),
        (["{models}:odd_mlp", "--letters", "s=2", "--out", "{new}"], "none"),
        (["{models}:odd_mlp", "--letters", "s,b,h,f,z", "--out", "{new}"], "z"),
        (["{models}:odd_mlp", "--letters", "s,b,h=2,f", "--out", "{new}"], "at s="),
        (["{tape}"], "at"),
        (["{tape}", "--at", "s=1"], "missing"),
        (["{tape}", "--at", "s=64,b=3,h=48,f=100,q=2"], "q"),
        (["{tape}", "--at", "s=1,b=3,h=48,f=100"], "1"),
        (["{models}", "--at", "s=64"], "tape"),
        (["{endless}", "--at", "s=64,b=3,h=48,f=100"], "is no monomial"),
        (["{beyond}", "--at", "s=64,b=3,h=48,f=100"], "a size is no formula's number"),
        (["{short}", "--at", "s=64,b=3,h=48,f=100"], "a monomial needs a power of each letter"),
        (["{deep}", "--at", "s=64,b=3,h=48,f=100"], "tape"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(options, says, solved, tmp_path, capsys):
    folder = tmp_path / "folder"
    folder.mkdir()
    named = {"models": MODELS, "tape": solved, "new": tmp_path / "new.json", "folder": folder}
    text = solved.read_text()
    wrong = {
        "endless": re.sub(
            r'"formulas":\[\[\["[^"]*"', '"formulas":[[["1e999999999"', text, count=1
        ),  # would take forever
        "beyond": re.sub(r'"":\[\[4,0\],\[0,0,\d+', '"":[[4,0],[0,0,-1', text, count=1),
        "short": text.replace('"letters":["s",', '"letters":['),
        "deep": "[" * 100_000,
    }
    for name, contents in wrong.items():
        named[name] = tmp_path / f"{name}.json"
        named[name].write_text(contents)
    code = main([option.format(**named) for option in options])
    error = capsys.readouterr().err.strip()
    assert code == 2 and says in error and error.count("\n") == 0, error


RULES = {
    "one product": lambda s, b, c: 34 * s * b,
    "a sum": lambda s, b, c: 4 * s * b + 2 * s * s,
    "causal chunks, with a half": lambda s, b, c: s * s * (4 * c - 1) // 2,
    "what c ranks gather": lambda s, b, c: 2 * s * b * c,
}


@pytest.mark.parametrize("name", RULES)
def test_it_holds_far_from_the_runs(name):
    def record(sizes: dict[str, int]) -> list[Event]:
        return [Make(0, RULES[name](**sizes), "kept")]

    tape = solve(record, Runs("sbc", {"s": (2, ())}, may_be_one=()))
    for sizes in ({"s": 8192, "b": 3, "c": 16}, {"s": 2 * 101, "b": 103, "c": 107}):
        assert tape.events(sizes) == record(sizes)


def test_as_many_monomials_as_runs_are_no_formula():
    sizes = {2: 10, 3: 77, 5: 200}
    with pytest.raises(NoFormula):
        solve(lambda at: [Make(0, sizes[at["a"]], "kept")], Runs("a", may_be_one=()))


def test_a_letter_that_others_give_leaves_no_power_open():
    def record(sizes):
        sizes["r"] = sizes["s"] * sizes["b"] * sizes["x"]
        return [Make(0, 2 * sizes["s"] * sizes["b"] * sizes["k"], "K"), Make(1, 4 * sizes["r"], "routed")]

    tape = solve(record, Runs("sbkxr", may_be_one=()))
    assert tape.events({"s": 40, "b": 3, "k": 5, "x": 2, "r": 240}) == [Make(0, 1200, "K"), Make(1, 960, "routed")]


def test_a_letter_can_be_alone_and_1():
    tape = solve(lambda at: [Make(0, 7 if at["b"] == 1 else 3 * at["b"], "kept")], Runs("b"))
    assert [sizes_of(tape.events({"b": b})[0]) for b in (1, 2, 64)] == [[7], [6], [192]]


def real(factory, sizes, blocks, again, path, part):
    """Kept and peak bytes of forward and backward, FLOPs and bytes moved, of a real run."""
    events = run_factory(factory, {**sizes, "l": blocks}, code=recompute_code(path, again, part))
    kept = next(live for event, live, _ in moments(events) if isinstance(event, Mark) and event.name == BACKWARD)
    peak = max(live for event, live, _ in moments(events) if isinstance(event, Run))
    reading = read_events(events)
    return kept, peak, reading.flops.total(), reading.moved_bytes.total()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "letters", "parts"),
    [
        ("stack", "s,b,h,f,v", ("mlp",)),
        ("biased_stack", "s,b,h", ("",)),
        at_night(("llama", "s,b,h,a,k,f,v", ("", "mlp", "self_attn", "operations", "every-second-matmul"))),
    ],
)
def test_any_number_of_blocks_is_a_real_run(name, letters, parts):
    if name.startswith("llama"):
        pytest.importorskip("transformers")
    factory = getattr(models_for_tapes, name)
    letters, rules, _ = parsed_letters(letters)
    at = draw_sizes(letters, rules, random.Random(1))
    solved = solved_blocks(factory, letters, rules, may_be_one=("b",), parts=parts, at=at)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for part, blocks, again in [(part, *counts) for part in solved for counts in ((7, 0), (6, 6), (7, 3), (3, 1))]:
        sizes = draw_sizes(letters, rules, rng) | {"s": rng.randrange(40, 90), "b": rng.choice((1, 4))}
        need = solved[part].need(sizes, again, blocks - again)
        told = need.kept_bytes, need.peak.bytes, need.matmul_flops, need.moved_bytes
        assert told == real(factory, sizes, blocks, again, solved[part].path, part)
        assert sum(row.bytes for row in need.peak.rows) == need.peak.bytes
        model = factory(**{**sizes, "num_layers": blocks})[0]
        ends, block, early, *frozen = solved[part].num_elements(sizes)
        assert ends + blocks * block == sum(p.numel() for p in model.parameters())
        last = "output.weight", "lm_head.weight", "model.norm.weight"
        outputs = [p.numel() for name, p in model.named_parameters() if name in last]
        assert early == sum(outputs) and frozen == [0, 0]


@pytest.mark.nightly
def test_blocks_that_are_not_alike_are_refused():
    letters, rules, _ = parsed_letters("s,b,h,f,v")
    with pytest.raises(ConfigError, match="aren't alike: [34] of them keep .* by runs of fewer"):
        solved_blocks(models_for_tapes.odd_stack, letters, rules)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("around", "path", "parts"),
    [
        (lambda blocks, h: nn.Sequential(*blocks), 'get_submodule("")', ("mlp.0",)),
        (lambda blocks, h: nn.Sequential(nn.Linear(h, h), nn.Sequential(*blocks)), 'get_submodule("1")', ()),
        (lambda blocks, h: Of(lambda m, x: nn.Sequential(*m.values())(x), **{f"layer_{i}": b for i, b in enumerate(blocks)}), "parts", ("operations", "every-second-matmul")),
    ],
)  # fmt: skip
def test_blocks_of_any_name_can_run_again(around, path, parts):
    def factory(b, h, l):
        return around([models_for_tapes.Block(h, 3 * h) for _ in range(l)], h), (torch.ones(b, h, requires_grad=True),)

    at = {"b": 4, "h": 8}
    solved = solved_blocks(factory, ["b", "h"], {}, parts=("", *parts), at=at)
    assert solved[""].path == path and len(solved) > len(parts)
    for part, blocks in solved.items():
        need = blocks.need(at, 2, 2)
        told = need.kept_bytes, need.peak.bytes, need.matmul_flops, need.moved_bytes
        assert told == real(factory, at, 4, 2, path, part)


@pytest.mark.parametrize("of_encoder", [0, 2])
def test_a_second_stack_must_not_grow(of_encoder):
    def factory(b, h, l):
        stacks = [nn.Sequential(*(nn.Linear(h, h) for _ in range(length))) for length in (of_encoder or l, l)]
        run = lambda m, x: m["decoder"](m["encoder"](x).sin())  # noqa: E731
        return Of(run, encoder=stacks[0], decoder=stacks[1]), (torch.ones(b, h, requires_grad=True),)

    at = {"b": 4, "h": 8}
    if not of_encoder:
        with pytest.raises(ConfigError, match="parts.decoder and parts.encoder both grow"):
            solved_blocks(factory, ["b", "h"], {}, at=at)
        return
    solved = solved_blocks(factory, ["b", "h"], {}, at=at)[""]
    need = solved.need(at, 4, 2)
    told = need.kept_bytes, need.peak.bytes, need.matmul_flops, need.moved_bytes
    assert told == real(factory, at, 6, 4, solved.path, "")


def test_a_model_without_blocks_is_refused():
    def mlp(s, b, h, l):  # noqa: E741
        return torch.nn.Linear(h, h), (torch.randn(b, s, h),)

    with pytest.raises(ConfigError, match="must have a list of 5 blocks.*: record --fake --at works"):
        solved_blocks(mlp, *parsed_letters("s,b,h")[:2])


def test_a_compiled_block_is_refused():
    def factory(b, h, l):
        blocks = [models_for_tapes.Block(h, 3 * h) for _ in range(l)]
        blocks[0].compile(backend="aot_eager")
        return nn.Sequential(*blocks), (torch.ones(b, h),)

    with pytest.raises(ConfigError, match="a compiled model makes other kernels at each size.*leave torch.compile out"):
        solved_blocks(factory, ["b", "h"], {})


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_blocks_that_get_no_gradient_are_named():
    def factory(b, h, l):
        blocks = nn.ModuleList(models_for_tapes.Block(h, 3 * h) for _ in range(l))

        def run(m, x):
            for block in m["blocks"]:
                x = checkpoint(block, x, use_reentrant=True)
            return m["head"](x)

        return Of(run, blocks=blocks, head=nn.Linear(h, h)), (torch.ones(b, h),)

    (note,) = solved_blocks(factory, ["b", "h"], {})[""].notes
    assert note.startswith("No gradient reaches parts.blocks.*.norm.weight, ") and "use_reentrant=False" in note


def test_adapters_leave_the_models_function_as_it_is():
    model, x = models_for_tapes.Stack(8, 8, 8, 2), torch.randn(3, 1, 8)
    before = [block(x) for block in model.blocks]
    exec(adapter_code("blocks", 2), {"model": model})
    assert all(map(torch.equal, [block(x) for block in model.blocks], before))


def test_a_loss_in_chunks_is_the_mean_over_tokens_that_have_a_label():
    model: Any = nn.Module()
    model.words, head = nn.Embedding(16, 6), nn.Linear(6, 16, bias=False)
    model.base_model = lambda input_ids, **others: SimpleNamespace(last_hidden_state=model.words(input_ids))
    model.get_output_embeddings = lambda: head
    exec(LOSS_CODE["chunked"], {"model": model})
    labels = torch.arange(16).view(2, 8).clone()
    labels[:, 2:7] = -100
    logits = head(model.words(torch.arange(16).view(2, 8)))[:, :-1]
    expected = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(model.forward(torch.arange(16).view(2, 8), labels)["loss"], expected)


def test_of_a_letter_all_rules_hold():
    letters, rules, fixed = parsed_letters("s:4,h:8,a,d:6,k,l=2", "d:4,s:6,v:8")
    assert (letters, fixed) == (["s", "h", "a", "d", "k"], {"l": 2})
    assert rules == {"s": (12, ()), "h": (8, ("a",)), "a": (1, ("k",)), "d": (12, ()), "k": (1, ())}


@pytest.mark.slow
def test_what_a_kernel_wants_is_found_and_what_no_size_mends_is_told():
    at = {"s": 64, "b": 4, "h": 96, "l": 6}
    found, sizes, number = solved_target(f"{MODELS}:aligned_stack", at, "", "bfloat16", [""])
    same, *_ = solved_target(f"{MODELS}:short_stack", at, "", "bfloat16", [""])
    assert found[""].need({**sizes, "b": 4}, 2, number) == same[""].need({**sizes, "b": 4}, 2, number)
    with pytest.raises(ConfigError, match="the factory raised ZeroDivisionError"):
        solved_target(f"{MODELS}:never_stack", at, "", "bfloat16", [""])


@pytest.mark.parametrize("chunk", [8, 256])
def test_three_monomials_take_a_run_more_than_those_of_two(chunk):
    """Four runs of (s/8 + 1)² are as well those of 27/16·s·b − 169/10·b² − 337/5."""
    runs = Runs(("s", "b"), {"s": (chunk, ())}, number=4, at={"s": 8 * chunk, "b": 2})
    tape = solve(lambda sizes: [Make(0, (sizes["s"] // chunk + 1) ** 2, "x")], runs, known=[])
    assert tape.events({"s": 9 * chunk, "b": 5}) == [Make(0, 100, "x")]


def test_one_run_is_enough_of_known_formulas_and_not_of_others():
    runs, ran, known = Runs(("s", "b"), {"s": (8, ())}, may_be_one="b", number=4, at={"s": 64, "b": 1}), [], []

    def record(sizes, size=lambda s, b: 4 * s * b):
        ran.append(sizes)
        return [Make(0, size(**sizes), "x"), Make(1, 71 * 19 * sizes["s"], "y")]

    solve(record, runs, known)
    first = {tuple(sizes.values()) for sizes in ran}
    ran.clear()
    assert sizes_of(solve(record, runs, known).events({"s": 72, "b": 5})[0]) == [4 * 72 * 5]
    (s, b), (s_at_one, one) = (sizes.values() for sizes in ran)
    assert (s, b) not in first and s % 19 and b % 71, "sizes of a run before, or with a constant's factors"
    assert (s_at_one, one) == (s, 1)
    for size in (lambda s, b: 6 * s * b, lambda s, b: 5056, lambda s, b: s * s + 2 * s * b):
        tape = solve(partial(record, size=size), runs, known)
        assert sizes_of(tape.events({"s": 72, "b": 5})[0]) == [size(72, 5)]


def test_what_isnt_run_again_on_fake_tensors_returns_what_it_did(monkeypatch):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)

        def forward(self, x):
            parts = self.norm(self.linear(x)).chunk(2, -1)
            x = torch.cat([parts[1], parts[0].transpose(0, 1).contiguous().transpose(0, 1)], -1)
            x = x.float().add_(1).unsqueeze(0)[..., 1:5].sigmoid() * torch.tensor(2.0).item()
            return x.expand(3, *x.shape[1:]).relu_().sum() + x.view(-1).max(0)[0].to(torch.float64)

    def recorded(b):
        with tensors_for(True):
            return run_factory(lambda b: (Odd(), (torch.randn(b, 4, 6),)), {"b": b}, "bfloat16")

    for b in (2, 3):
        with monkeypatch.context() as patch:
            patch.setattr("actmem_tools.tape.record._result", lambda func, args, kwargs: func(*args, **kwargs))
            expected = recorded(b)
        assert [recorded(b) for _ in range(3)] == [expected] * 3
