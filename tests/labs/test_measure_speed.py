"""measure_speed as a user starts it: the fields, the files, what it refuses.  Times are never judged."""

import json
import sys

import torch
from torch.utils.flop_counter import FlopCounterMode

from actmem.config import ModelShape
from actmem.formulas.flops import hardware_flops
from actmem.layers.transformer import TransformerLayer
from actmem_course import launch
from actmem_course.bench import measure_speed as speed
from actmem_course.bench.measure_speed import BASELINE, VARIANTS
from actmem_course.bench.race import Runner
from actmem_course.others.paper import TABLE4
from tests.labs.in_process import lab_module, shown_in_80_columns

SCRIPT = "measure_speed.py"
TINY = ["--seq-length", 16, "--micro-batch-size", 1, "--hidden-size", 32, "--num-attention-heads", 4, "--rounds", 2]


def check_lines(lines):
    assert [line["name"] for line in lines] == [variant.name for variant in VARIANTS]
    assert lines[0]["name"] == BASELINE and lines[0]["over"] is None
    for line in lines:
        assert line["held_bytes"] == line["predicted_bytes"] > 0 and line["peak_bytes"] > line["held_bytes"]
        assert line["combined_seconds"] > 0 and line["finite"]
        assert (line["recompute_seconds"] > 0) == (line["recompute"] != "none")
        assert line["backward_seconds"] > line["recompute_seconds"]


def test_every_row_of_table_4_is_there():
    assert [variant.name for variant in VARIANTS if not variant.literal] == list(TABLE4)
    assert {variant.paper_row for variant in VARIANTS} == set(TABLE4)


def test_emulated_with_all_files(tmp_path):
    files = {name: tmp_path / name for name in ("json", "html", "trace")}
    shown = shown_in_80_columns(SCRIPT, "--emulate", 2, *TINY, *(f"--{name}={path}" for name, path in files.items()))
    check_lines(json.loads(files["json"].read_text()))
    assert "exchanges send nothing here" in " ".join(shown.split()) and "All 8 layers hold" in shown
    assert "Noise: the baseline against itself" in shown
    assert "Full recomputation costs" in files["html"].read_text()
    assert "core attention recompute" in files["trace"].read_text()


def test_under_torchrun():
    check_lines(launch.results(SCRIPT, *TINY, processes=2))


def test_products_alone_are_all_of_a_layers_products():
    shape = ModelShape(16, 2, 32, 4)
    layer = TransformerLayer(shape)
    leaf = torch.randn(16, 2, 32, requires_grad=True)
    counted = []
    works = (speed.products_of(shape), Runner(layer, leaf).work())
    for work in works:
        with FlopCounterMode(display=False) as counter:
            work.backward(work.forward())
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] == hardware_flops(shape.with_sizes(num_layers=1, vocab_size=1), 2) - 6 * 16 * 2 * 32


def test_share_of_the_products(monkeypatch, capsys, tmp_path):
    small = (ModelShape(16, 2, 32, 4), ModelShape(8, 1, 16, 2))
    monkeypatch.setattr(speed, "SHAPES", small)
    path = tmp_path / "products.json"
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", [SCRIPT, "--products", "--rounds", "2", "--json", str(path)])
    assert lab_module(SCRIPT).main() == 0
    out, pairs = capsys.readouterr().out, json.loads(path.read_text())
    assert [pair["over"]["value"] > -1 for pair in pairs] == [True] * 4
    assert [pair["first"].partition(", ")[2] for pair in pairs] == ["with dropout", "without dropout"] * 2
    assert all(len(line) <= 80 for line in out.splitlines()) and "s=8 b=1 h=16 a=2, without dropout: " in out
