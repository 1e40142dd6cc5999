"""``actmem record`` and ``diff``: what they print and write, and one line on bad input."""

import json
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actmem.config import ModelShape
from actmem.formulas.activations import layer_extra_rows, layer_rows
from actmem.ledger.ledger_tables import fold
from actmem.ledger.recorder import SavedTensor
from actmem.recipes import PAPER_LAYER
from actmem.rows import total
from actmem_tools import record_command
from actmem_tools.__main__ import main
from actmem_tools.record_page import page
from tests.measure import factories_for_tests

HERE = "tests.measure.factories_for_tests"


def record(*arguments):
    return main(["record", *arguments])


def json_of(capsys, *arguments):
    assert record(*arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_rows_add_up_and_have_the_promised_fields(capsys):
    result = json_of(capsys, f"{HERE}:tiny")
    assert result["total_bytes"] == sum(row["bytes"] for row in result["rows"]) == 3 * 4 * 8 * 4
    assert [(r["module"], r["op"], r["shape"], r["dtype"], r["kind"]) for r in result["rows"]] == [
        ("0", "linear", [4, 8], "float32", "input"),
        ("1", "gelu", [4, 8], "float32", "activation"),
        ("2", "linear", [4, 8], "float32", "activation"),
    ]
    assert "peak" not in result


@pytest.mark.by_day(1)
@pytest.mark.parametrize("fake", [(), ("--fake",)])
def test_a_step_bills_its_peak(capsys, fake):
    result = json_of(capsys, f"{HERE}:gpt", "--step", *fake)
    assert result["peak_bytes"] == sum(row["bytes"] for row in result["peak"]) == max(result["curve"])
    kinds = {row["kind"] for row in result["peak"]}
    assert {"weight", "optimizer state", "gradient", "activation", "input"} <= kinds


@pytest.mark.slow
def test_a_file_works_too_and_the_library_alone_is_enough(tmp_path):
    Path(tmp_path / "mine.py").write_text(
        "import sys, torch\nfor name in ('plotly', 'jupyterlab', 'ipywidgets'):\n    sys.modules[name] = None\n"
        "def factory():\n    return torch.nn.Linear(8, 8), (torch.ones(4, 8),)\n"
    )
    command = [sys.executable, "-m", "actmem_tools", "record", "mine.py:factory", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and json.loads(done.stdout)["total_bytes"] == 128, done.stderr


def test_keyword_inputs_dtypes_and_sizes(capsys):
    assert json_of(capsys, f"{HERE}:by_keyword")["total_bytes"] == 128
    assert json_of(capsys, f"{HERE}:by_keyword", "--dtype", "bfloat16")["total_bytes"] == 64
    assert json_of(capsys, f"{HERE}:by_keyword", "--dtype", "bfloat16", "--fake")["total_bytes"] == 64
    one, two = (json_of(capsys, f"{HERE}:layer", "--at", f"b={b}")["total_bytes"] for b in (1, 2))
    assert two == 2 * one


def test_a_fake_run_says_whether_real_tensors_agree(capsys):
    assert json_of(capsys, f"{HERE}:gpt", "--fake")["notes"] == ["checked: real tensors keep the same bytes"]
    (note,) = json_of(capsys, f"{HERE}:other_when_fake", "--fake")["notes"]
    assert "real tensors keep something else: 256 B instead of 384 B" in note


def test_a_fake_mask_of_padding_is_said_to_mask_nothing(capsys):
    pytest.importorskip("transformers")
    mask, check = json_of(capsys, f"{HERE}:padded", "--fake")["notes"]
    assert mask.startswith("attention_mask counts as all ones") and "real tensors keep something else" in check


def test_everyday_code_makes_a_model_of_fake_tensors(capsys):
    fake, real = (json_of(capsys, f"{HERE}:everyday", *more) for more in (("--fake",), ()))
    assert fake["notes"] == ["checked: real tensors keep the same bytes"]
    assert fake["rows"] == real["rows"]


def test_a_large_fake_run_is_checked_at_small_sizes(capsys):
    result = json_of(capsys, f"{HERE}:deep", "--fake")
    assert result["total_bytes"] == 100 * 64 * 4 * 8 << 20
    assert result["notes"] == ["checked at s=16, b=2, l=2: real tensors keep the same bytes"]
    result = json_of(capsys, f"{HERE}:for_long_sequences", "--fake")
    assert result["total_bytes"] == 2 * 64 * 4 << 20  # what was asked for ran, and only the small trial didn't
    (note,) = result["notes"]
    assert note.startswith("not checked against real tensors at s=16: the model's forward raised ValueError: a window")
    (note,) = json_of(capsys, f"{HERE}:deep_lookup", "--fake")["notes"]
    other, same = 3 * 16 * 2 * 8 * 4, 2 * 16 * 2 * 8 * 4
    assert f"something else at s=16, b=2: {same:,} B instead of {other:,} B" in note


def test_real_tensors_are_tried_where_weights_and_what_is_kept_are_small_together(capsys, monkeypatch):
    model, _ = factories_for_tests.gpt()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    together = weights + json_of(capsys, f"{HERE}:gpt", "--fake")["total_bytes"]
    for limit, tried in ((together, True), (together - 1, False)):
        monkeypatch.setattr(record_command, "_CHECKED_BYTES", limit)
        (note,) = json_of(capsys, f"{HERE}:gpt", "--fake")["notes"]
        assert note.startswith("checked:" if tried else "fake tensors only: too large")


BAD = {
    f"{HERE}:raises": "target: the factory raised ValueError: two lines",
    f"{HERE}:exits": "target: the factory raised SystemExit: usage: train.py",
    f"{HERE}:only_a_model": "must return (model, inputs), and returned a Linear",
    f"{HERE}:no_inputs": "inputs: the model's forward raised TypeError",
    f"{HERE}:NOT_A_FUNCTION": "is a int, not a function",
    f"{HERE}:nothing": "has no nothing",
    "no.such.module:f": "can't be loaded: ModuleNotFoundError",
    "'no\nsuch:factory'": "can't be loaded",
    "word": "must be pkg.module:factory or file.py:factory",
    f"{HERE}:tiny --at s=9": "s: the factory takes none of s, seq_length",
    f"{HERE}:tiny --html /no/such/folder/x.html": "argument --html: cannot write /no/such/folder/x.html: not in a directory",
    f"{HERE}:compiled --fake": "fake: torch.compile does not run on fake tensors",
    f"{HERE}:tiny --at s=१२": "at: must be sizes as s=200,b=3",
}


@pytest.mark.parametrize("arguments", BAD)
def test_bad_input_is_one_line_and_2(arguments, capsys):
    assert record(*shlex.split(arguments)) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "factory that talks" not in line]
    assert not out and len(lines) == 1 and BAD[arguments] in lines[0], err


def test_a_page_stands_alone(tmp_path):
    path = tmp_path / "page.html"
    assert record(f"{HERE}:gpt", "--step", "--html", str(path)) == 0
    text = path.read_text(encoding="utf-8")
    assert "layers.0-3.mlp.down ×4" in text and '"peak_bytes"' in text
    assert "<h2>One step: " in text and '<div id="curve">' in text
    addresses = set(re.findall(r"""(?:https?:)?//[\w.]+""", text)) - {"http://www.w3.org"}
    assert not addresses and "src=" not in text and "@import" not in text


def test_a_name_with_markup_stays_text(tmp_path):
    row = {"module": "</script><b>", "op": "<i>", "argument": "", "shape": [1], "dtype": "float32", "bytes": 4}
    row |= {"kind": "activation", "line": "", "held_by": ""}
    text = page({"target": "<u>", "total_bytes": 4, "rows": [row]})
    assert text.count("</script>") == 2 and "<b>" not in text and "<i>" not in text and "<u>" not in text


def test_diff_names_what_went_came_and_stayed(tmp_path, capsys):
    files = []
    for name in ("layer", "selective"):
        files.append(str(tmp_path / f"{name}.json"))
        assert record(f"{HERE}:{name}", "--json", files[-1]) == 0
    capsys.readouterr()
    assert main(["diff", *files]) == 0
    text = capsys.readouterr().out
    sizes = [json.loads(Path(file).read_text())["total_bytes"] for file in files]
    assert text.startswith(f"{sizes[0]:,} B before, {sizes[1]:,} B after: {sizes[1] - sizes[0]:+,} B")
    went, came, stayed = text.split("\n\n")[1:]
    assert went.startswith("went:") and "softmax" in went and "softmax" not in stayed
    assert came.startswith("came:") and "uint8" in came and "mlp.down" in stayed
    # Without Q, K and V, from which the second run starts.
    rows = layer_rows(shape := ModelShape(16, 2, 32, 4), recompute="selective") + layer_extra_rows(shape)
    kept = total(row for row in rows if row.term not in PAPER_LAYER.one_tensor)
    assert stayed.startswith("stayed:") and f", {kept:,} B" in stayed.splitlines()[0]


@pytest.mark.parametrize("contents", [None, "{}", "nonsense", '{"rows": [1]}', "[" * 100_000])
def test_diff_of_what_is_no_record(tmp_path, capsys, contents):
    path = tmp_path / "a.json"
    if contents is not None:
        path.write_text(contents)
    assert main(["diff", str(path), str(path)]) == main(["diff", str(path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_failed_step_leaves_the_ledger(capsys, tmp_path):
    file = tmp_path / "ledger.json"
    assert record(f"{HERE}:without_backward", "--step", "--json", str(file)) == 2
    out, err = capsys.readouterr()
    assert json.loads(file.read_text())["total_bytes"] == 128 and out.startswith("128 B")
    assert err.splitlines()[-1].endswith("step: the training step raised RuntimeError: no backward here")


def test_eval_mode_is_noted_and_a_loss_of_ones_own_runs(capsys):
    (note,) = json_of(capsys, f"{HERE}:in_eval_mode")["notes"]
    plain, own = (json_of(capsys, f"{HERE}:tiny", "--step", *more) for more in ((), ("--loss", f"{HERE}:squared")))
    assert "eval mode" in note and not plain["notes"] and len(own["curve"]) > len(plain["curve"])


@pytest.mark.filterwarnings("ignore:None of the inputs")
def test_trained_weights_without_a_gradient_and_what_is_not_counted_are_noted(capsys):
    notes = " ".join(json_of(capsys, f"{HERE}:half_trained", "--step")["notes"])
    assert "No gradient reaches blocks.*.weight, blocks.*.bias, which" in notes and "use_reentrant=False" in notes
    assert ("oneDNN" in notes) == torch.backends.mkldnn.is_available()


def sharded_bill(folder):
    assert record(f"{HERE}:sharded", "--step", "--json", f"{folder}/step.json") == 0
    rank = torch.distributed.get_rank()
    return json.loads(Path(folder, f"step-rank{rank}.json").read_text())


def test_each_rank_of_fsdp_writes_a_bill_of_its_own(pools, tmp_path):
    for result in pools[2].run(sharded_bill, str(tmp_path)):
        kinds = {row["kind"] for row in result["peak"]}
        assert "gathered weight" in kinds and not any(row["op"] == "copy of the weight" for row in result["peak"])
        # Of three blocks and a head: what autograd keeps is each block's result.
        kept = [row for row in result["peak"] if row["kind"] == "activation"]
        assert kept and all(row["op"] == "relu" and row["shape"] == [8, 64] for row in kept)
        own = sum(row["bytes"] for row in result["peak"] if row["kind"] == "weight")
        assert own == 4 * (3 * (64 * 64 + 64) + 64 * 32 + 32) // 2


def test_rows_that_others_hold_are_not_one_row():
    row = SavedTensor("0", "add", "", (4,), "float32", 16, "", held_by="an attribute of M")
    assert fold([row, replace(row, module="1"), replace(row, held_by="the closure of f")])[0].bytes == 32
