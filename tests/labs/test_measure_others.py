"""What everyone keeps: every cell's formula is what the ledger counts, and one that is wrong is found."""

import json
import warnings
from dataclasses import replace

import pytest

from actmem.config import ConfigError
from actmem.formulas.llama_terms import expert_mlp_rows, llama_rows
from actmem.llama_shape import LlamaShape, llama_shape
from actmem.rows import total
from actmem_course.bench import measure_others
from actmem_course.bench.peers import PeerUnavailable
from actmem_course.others.others_keep import FRAMEWORKS, OTHERS, bytes_of_other
from tests.labs.in_process import shown_in_80_columns


@pytest.mark.nightly
def test_every_cell_is_what_is_counted(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    path = tmp_path / "others.json"
    shown = shown_in_80_columns("measure_peers.py", "--today", "--json", path)
    lines = json.loads(path.read_text())
    assert len(lines) == 2 * len(OTHERS) + sum(3 if layer.divided else 2 for layer in FRAMEWORKS) == 48
    ran = [line for line in lines if not line["unavailable"]]
    assert all(line["measured_bytes"] == line["predicted_bytes"] > 0 for line in ran)
    left_out = {line["name"].partition(" ")[0].rstrip(",") for line in lines if line["unavailable"]}
    assert left_out <= {"Liger's", "megatron-core"} and len(ran) >= 34
    assert f"{len(ran)} of {len(ran)} measurements agree with the formulas to the byte" in shown


def test_what_is_not_installed_is_left_out_and_ours_stays(monkeypatch):
    def missing(*arguments):
        raise PeerUnavailable("not here")

    monkeypatch.setattr(measure_others, "hugging_face_block", missing)
    monkeypatch.setattr(measure_others, "FRAMEWORKS", ())
    lines = measure_others.measure_others()
    assert {line.name for line in lines if line.measured_bytes is not None} == {
        "ours",
        "ours, elementwise",
        "ours, experts",
    }
    assert all(line.measured_bytes == line.predicted_bytes for line in lines if not line.unavailable)
    assert {line.unavailable for line in lines} == {"", "not here"}


@pytest.mark.parametrize(
    "layer", [layer for layer in FRAMEWORKS if "paper" not in layer.name], ids=lambda layer: layer.name
)
def test_a_framework_keeps_what_its_formula_says(layer):
    if layer.name.startswith("megatron-core"):
        pytest.importorskip("megatron", reason="megatron-core is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines = measure_others.other_lines(layer)
    assert [line.measured_bytes for line in lines] == [line.predicted_bytes for line in lines]
    assert len(lines) == (3 if layer.divided else 2)


def test_on_paper_is_said_and_never_counted():
    liger = FRAMEWORKS[-1]
    assert all(line.measured_bytes is None and "GPU" in line.unavailable for line in measure_others.other_lines(liger))
    # Fused operators keep the floor of part A, and the tables of the positions.
    compiled = next(layer for layer in FRAMEWORKS if layer.name.endswith("torch.compile"))
    assert {**compiled.coefficients, "sd": 4} == liger.coefficients
    assert compiled.coefficients == next(layer for layer in OTHERS if layer.name == "ours").coefficients


def test_a_framework_refuses():
    cut, whole = FRAMEWORKS[1], FRAMEWORKS[-1]
    shape = LlamaShape(16, 2, 64, 4, 2, 160)
    assert cut.formula == "4sbh + (20sbh + 4sbkd + 8sbf + 4asb + 8sb)/t"
    with pytest.raises(ConfigError, match="^tensor_parallel_size: nothing cuts this layer"):
        bytes_of_other(whole, shape, 2)
    with pytest.raises(ConfigError, match="^num_key_value_heads: 2 must be divisible"):
        bytes_of_other(cut, shape, 4)
    with pytest.raises(ConfigError, match="^seq_length: 15 must be divisible"):
        bytes_of_other(cut, shape.with_sizes(seq_length=15), 2)


def test_a_wrong_formula_is_found(monkeypatch):
    ours = next(layer for layer in OTHERS if layer.name == "ours")
    wrong = replace(ours, coefficients={**ours.coefficients, "sbf": 8})
    monkeypatch.setattr(measure_others, "OTHERS", (wrong,))
    monkeypatch.setattr(measure_others, "FRAMEWORKS", ())
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
    sdpa = OTHERS[0]
    without = {product: count for product, count in sdpa.coefficients.items() if product in ("sbh", "sbkd", "sbf")}
    kept = bytes_of_other(replace(sdpa, coefficients=without), llama)
    assert kept == 49 * llama.seq_length * llama.hidden_size
    assert sdpa.formula == "20sbh + 4sbkd + 8sbf + 4asb + 8sb + 4sd"
