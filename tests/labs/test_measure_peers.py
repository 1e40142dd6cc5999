"""measure_peers as a user starts it: every peer in every mode, what everyone keeps, and what cannot run is said."""

import importlib.util
import json
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from measure_peers import PEER_MODES, measure_peers

from actmem.config import ConfigError, ModelShape
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.storages import replaced
from actmem.parallel import collectives
from actmem.parallel.groups import tensor_parallel
from actmem.rows import total
from actmem_course.lab_tools.held_bytes import Runner
from actmem_course.others.others_keep import FRAMEWORKS, OTHERS, bytes_of_other
from actmem_course.peers import PeerUnavailable, blocks
from actmem_course.peers.build import OURS, PEERS, build
from actmem_course.peers.plain import PlainLayer, our_reduce_scatter
from actmem_course.ranks import Ranks
from actmem_more.llama_shape import LlamaShape, llama_shape
from actmem_more.llama_terms import expert_mlp_rows, llama_rows
from tests.labs.in_process import shown_in_80_columns
from tests.tiers import at_night

SCRIPT = "measure_peers.py"
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
TINY = ["--seq-length", 16, "--micro-batch-size", 2, "--hidden-size", 32, "--num-attention-heads", 4, "--rounds", 2]


def test_every_mode_and_peer(tmp_path):
    path = tmp_path / "peers.json"
    shown = shown_in_80_columns(SCRIPT, "--emulate", 2, *TINY, "--json", path)
    assert "gloo" not in shown  # an emulated rank exchanges nothing
    lines = json.loads(path.read_text())
    wanted = [(mode, name) for mode in PEER_MODES for name in (OURS, *PEERS)]
    assert [(line["mode"], line["name"]) for line in lines] == wanted
    by_name = {(line["mode"], line["name"]): line for line in lines}
    for line in lines:
        if line["unavailable"]:
            torchs = line["mode"] == "elementwise" and line["name"] in ("DTensor", "FSDP2")
            assert (torchs or line["name"] == "megatron-core") and line["unavailable"] in " ".join(shown.split())
            continue
        assert line["combined_seconds"] > 0 and line["peak_bytes"] >= line["held_bytes"] > 0
        assert (line["ours"] is None) == (line["name"] == OURS)
        assert (line["over"] is None) == (line["mode"] == "none")
    assert by_name["none", "DTensor"]["held_bytes"] > by_name["none", OURS]["held_bytes"]
    assert by_name["none", "FSDP2"]["sequences"] == 2
    if HAS_MEGATRON:  # as² of attention and 2sh outside of it, each 4 bytes for 1, t = 2
        assert by_name["none", "megatron-core"]["wide_mask_bytes"] == 3 * (4 * 16 * 16 * 2 + 2 * 16 * 2 * 32) // 2


def test_on_two_ranks_elementwise_beside_selective_and_the_same_exchange(tmp_path):
    path = tmp_path / "peers.json"
    chosen = ["--recompute", "none", "--recompute", "selective", "--recompute", "elementwise", "--peer", "DTensor"]
    shown = " ".join(shown_in_80_columns(SCRIPT, *TINY, *chosen, "--json", path, processes=2).split())
    assert "20/34 of its bytes in 16 bits (sbh/t)" in shown
    assert "its reduce-scatter over gloo sends only what is kept" in shown
    lines = {(line["mode"], line["name"]): line for line in json.loads(path.read_text())}
    shipped, same = lines["none", "DTensor"], lines["none", "DTensor, our exchange"]
    assert shipped["held_bytes"] == same["held_bytes"] and same["combined_seconds"] > 0
    assert [key for key, line in lines.items() if line["over_selective"] is not None] == [("elementwise", OURS)]
    assert lines["elementwise", OURS]["held_bytes"] < lines["selective", OURS]["held_bytes"]


def exchanges_on_ranks(name):
    """Outputs and gradients of a peer's layer as shipped and with our exchange, and how many were ours."""
    warnings.filterwarnings("ignore")
    tp = tensor_parallel(sequence_parallel=True)
    leaf = torch.arange(8 * 2 * 32, dtype=torch.float64).sin().view(8, 2, 32).requires_grad_()
    shipped = Runner(build(name, ModelShape(16, 2, 32, 4), tp, "none", "cpu", torch.float64, p=0.0), leaf).work()
    results = []
    for work in (shipped, shipped.under(partial(our_reduce_scatter, tp))):
        calls = []
        with replaced(collectives, "start_sending_parts", lambda ours: lambda *a: calls.append(1) or ours(*a)):
            output = work.forward()
            work.backward(output)
        results.append((output.detach(), leaf.grad, len(calls)))
        work.finish()
    (y, grad, of_torch), (y_same, grad_same, ours) = results
    return float((y - y_same).abs().max()), float((grad - grad_same).abs().max()), of_torch, ours


@pytest.mark.parametrize("name", ["DTensor"] + ["megatron-core"] * HAS_MEGATRON)
def test_with_our_exchange_a_peer_computes_the_same(name, pools):
    for of_output, of_gradient, of_torch, ours in pools[2].run(exchanges_on_ranks, name):
        assert max(of_output, of_gradient) < 1e-12
        assert (of_torch, ours) == (0, 4)  # two of forward, two of backward


def test_a_peer_that_fails_is_left_out_and_one_that_has_more_sequences_is_scaled(monkeypatch):
    def uncut(shape, tp, recompute, *, p, device, dtype):
        return PlainLayer(shape, recompute, p, device=device, dtype=dtype)

    def failing(error):
        def layer(*args, **options):
            raise error

        return layer

    monkeypatch.setitem(PEERS, "DTensor", failing(PeerUnavailable("not here")))
    monkeypatch.setitem(PEERS, "megatron-core", failing(ValueError("first line\nsecond line")))
    monkeypatch.setitem(PEERS, "FSDP2", uncut)
    with emulated_rank(4, real_tensors=True):
        ranks = Ranks(0, 4, "cpu", True)
        lines = measure_peers(ModelShape(16, 1, 32, 4), ranks, torch.float32, rounds=3, modes=["none"])
    ours, dtensor, megatron, fsdp = lines
    assert ours["name"] == OURS and not ours["unavailable"]
    assert (dtensor["unavailable"], megatron["unavailable"]) == ("not here", "ValueError: first line")
    assert ours.keys() == dtensor.keys() and fsdp["sequences"] == 4
    assert fsdp["ours"]["low"] <= fsdp["ours"]["value"] <= fsdp["ours"]["high"]


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

    monkeypatch.setattr(blocks, "hugging_face_block", missing)
    monkeypatch.setattr(blocks, "FRAMEWORKS", ())
    lines = blocks.measure_blocks()
    counted = {line["name"] for line in lines if line["measured_bytes"] is not None}
    assert counted == {"ours", "ours, elementwise", "ours, experts"}
    assert all(line["measured_bytes"] == line["predicted_bytes"] for line in lines if not line["unavailable"])
    assert {line["unavailable"] for line in lines} == {"", "not here"}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "layer",
    [at_night(layer) if "torch.compile" in layer.name else layer for layer in FRAMEWORKS if "paper" not in layer.name],
    ids=lambda layer: layer.name,
)
def test_a_framework_keeps_what_its_formula_says(layer):
    if layer.name.startswith("megatron-core"):
        pytest.importorskip("megatron", reason="megatron-core is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lines = blocks.rows_of(layer)
    assert [line["measured_bytes"] for line in lines] == [line["predicted_bytes"] for line in lines]
    assert len(lines) == (3 if layer.divided else 2)


def test_on_paper_is_said_and_never_counted():
    liger = FRAMEWORKS[-1]
    assert all(line["measured_bytes"] is None and "GPU" in line["unavailable"] for line in blocks.rows_of(liger))
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
    monkeypatch.setattr(blocks, "OTHERS", (wrong,))
    monkeypatch.setattr(blocks, "FRAMEWORKS", ())
    assert all(line["measured_bytes"] < line["predicted_bytes"] for line in blocks.measure_blocks())


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
