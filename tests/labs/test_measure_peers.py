"""measure_peers as a user starts it: every peer in every mode, and what cannot run is said."""

import importlib.util
import json
import warnings
from functools import partial

import pytest
import torch

from actmem.config import ModelShape
from actmem.measure.emulate import emulated_rank
from actmem.measure.tools import replaced
from actmem.parallel import collectives
from actmem.parallel.groups import tensor_parallel
from actmem_course.bench import measure_peers as peers
from actmem_course.bench.hold import Runner
from actmem_course.bench.measure_peers import OURS, PEER_MODES, PEERS, measure_peers
from actmem_course.bench.peers import PeerUnavailable
from actmem_course.bench.peers.plain import PlainLayer
from actmem_course.bench.peers.same_exchange import our_reduce_scatter
from actmem_course.ranks import Ranks
from tests.labs.in_process import shown_in_80_columns

SCRIPT = "measure_peers.py"
HAS_MEGATRON = importlib.util.find_spec("megatron") is not None
TINY = ["--seq-length", 16, "--micro-batch-size", 2, "--hidden-size", 32, "--num-attention-heads", 4, "--rounds", 2]


def test_every_mode_and_peer(tmp_path):
    path = tmp_path / "peers.json"
    shown = shown_in_80_columns(SCRIPT, "--emulate", 2, *TINY, "--json", path)
    assert "gloo" not in shown  # an emulated rank exchanges nothing
    lines = json.loads(path.read_text())
    assert [(line["mode"], line["name"]) for line in lines] == [
        (mode, name) for mode in PEER_MODES for name in (OURS, *PEERS)
    ]
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


def test_under_torchrun_elementwise_beside_selective_and_the_same_exchange(tmp_path):
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
    shipped = Runner(peers.build(name, ModelShape(16, 2, 32, 4), tp, "none", "cpu", torch.float64, p=0.0), leaf).work()
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

    monkeypatch.setitem(peers.PEERS, "DTensor", failing(PeerUnavailable("not here")))
    monkeypatch.setitem(peers.PEERS, "megatron-core", failing(ValueError("first line\nsecond line")))
    monkeypatch.setitem(peers.PEERS, "FSDP2", uncut)
    with emulated_rank(4, real_tensors=True):
        lines = measure_peers(
            ModelShape(16, 1, 32, 4), Ranks(0, 4, "cpu", True), torch.float32, rounds=3, modes=["none"]
        )
    ours, dtensor, megatron, fsdp = lines
    assert ours.name == OURS and not ours.unavailable
    assert (dtensor.unavailable, megatron.unavailable) == ("not here", "ValueError: first line")
    assert fsdp.sequences == 4
    assert fsdp.ours.low <= fsdp.ours.value <= fsdp.ours.high
