"""What everyone keeps: every cell's formula is what the ledger counts, and one that is wrong is found."""

import json
from dataclasses import replace

import pytest

from actmem.checks import ConfigError
from actmem.formulas.expert_terms import expert_mlp_rows
from actmem.formulas.llama_terms import llama_rows
from actmem.llama_shape import llama_shape
from actmem.plan import others_keep
from actmem.plan.others_keep import OTHERS, bytes_of_other
from actmem.rows import total
from actmem_course import launch
from actmem_course.bench import measure_others
from actmem_course.bench.peers import PeerUnavailable


def test_every_cell_is_what_is_counted(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    path = tmp_path / "others.json"
    done = launch.run("measure_peers.py", "--today", "--json", path)
    assert done.returncode == 0, done.stderr
    lines = json.loads(path.read_text())
    assert len(lines) == 2 * len(OTHERS) == 24
    assert all(line["measured_bytes"] == line["predicted_bytes"] > 0 and not line["unavailable"] for line in lines)
    assert "24 of 24 measurements agree with the formulas to the byte" in done.stdout
    assert all(len(line.rstrip()) <= 80 for line in done.stdout.splitlines()) and "…" not in done.stdout


def test_what_is_not_installed_is_left_out_and_ours_stays(monkeypatch):
    def missing(*arguments):
        raise PeerUnavailable("not here")

    monkeypatch.setattr(measure_others, "hugging_face_block", missing)
    lines = measure_others.measure_others()
    assert {line.name for line in lines if line.measured_bytes is not None} == {
        "ours",
        "ours, elementwise",
        "ours, experts",
    }
    assert all(line.measured_bytes == line.predicted_bytes for line in lines if not line.unavailable)
    assert {line.unavailable for line in lines} == {"", "not here"}


def test_a_wrong_formula_is_found(monkeypatch):
    ours = next(layer for layer in OTHERS if layer.name == "ours")
    wrong = replace(ours, coefficients={**ours.coefficients, "sbf": 8})
    monkeypatch.setattr(measure_others, "OTHERS", (wrong,))
    assert all(line.measured_bytes < line.predicted_bytes for line in measure_others.measure_others())


def test_ours_are_the_formulas_of_the_library():
    by_name = {(layer.name, layer.dtype): layer for layer in OTHERS}
    llama, mixtral = llama_shape("llama3-8b"), llama_shape("mixtral-8x7b")
    assert bytes_of_other(by_name["ours", "bfloat16"], llama) == total(llama_rows(llama))
    elementwise = total(llama_rows(llama, recompute="elementwise"))
    assert bytes_of_other(by_name["ours, elementwise", "bfloat16"], llama) == elementwise
    assert bytes_of_other(by_name["ours, experts", "bfloat16"], mixtral) == total(expert_mlp_rows(mixtral))


def test_hugging_faces_llama_keeps_49_sbh_in_8bs_proportions():
    llama = llama_shape("llama3-8b")
    sdpa = others_keep.OTHERS[0]
    without = {product: count for product, count in sdpa.coefficients.items() if product in ("sbh", "sbkd", "sbf")}
    kept = bytes_of_other(replace(sdpa, coefficients=without), llama)
    assert kept == 49 * llama.seq_length * llama.hidden_size
    assert sdpa.formula == "20sbh + 4sbkd + 8sbf + 4asb + 8sb + 4sd"


def test_refuses():
    with pytest.raises(ConfigError, match="^shape: must be of type LlamaShape"):
        bytes_of_other(OTHERS[0], None)
