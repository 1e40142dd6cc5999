"""measure_peers as a user starts it: every peer in every mode, and what cannot run is said."""

import json
import warnings
from functools import partial

import torch
from measure_peers import PEER_MODES, measure_peers

from actmem.config import ModelShape
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.storages import replaced
from actmem.parallel import collectives
from actmem.parallel.groups import tensor_parallel
from actmem_course.lab_tools.held_bytes import Runner
from actmem_course.peers import OURS, PEERS, PeerUnavailable, PlainLayer, build, our_reduce_scatter
from actmem_course.ranks import Ranks
from tests.labs.in_process import shown_in_80_columns

SCRIPT = "measure_peers.py"
TINY = ["--seq-length", 16, "--micro-batch-size", 2, "--hidden-size", 32, "--num-attention-heads", 4, "--rounds", 2]


def test_every_mode_and_peer(tmp_path):
    path = tmp_path / "peers.json"
    shown = shown_in_80_columns(SCRIPT, "--emulate", 2, *TINY, "--json", path)
    assert "gloo" not in shown  # an emulated rank sends nothing
    lines = json.loads(path.read_text())
    wanted = [(mode, name) for mode in PEER_MODES for name in (OURS, *PEERS)]
    assert [(line["mode"], line["name"]) for line in lines] == wanted
    by_name = {(line["mode"], line["name"]): line for line in lines}
    for line in lines:
        if line["unavailable"]:
            assert line["mode"] == "elementwise" and line["name"] in ("DTensor", "FSDP2")
            assert line["unavailable"] in " ".join(shown.split())
            continue
        assert line["combined_seconds"] > 0 and line["peak_bytes"] >= line["held_bytes"] > 0
        assert (line["ours"] is None) == (line["name"] == OURS)
        assert (line["over"] is None) == (line["mode"] == "none")
    assert by_name["none", "DTensor"]["held_bytes"] > by_name["none", OURS]["held_bytes"]
    assert by_name["none", "FSDP2"]["sequences"] == 2


def test_on_two_ranks_with_the_same_collective(tmp_path):
    path = tmp_path / "peers.json"
    chosen = ["--recompute", "none", "--recompute", "selective", "--recompute", "elementwise", "--peer", "DTensor"]
    shown = " ".join(shown_in_80_columns(SCRIPT, *TINY, *chosen, "--json", path, processes=2).split())
    assert "its reduce-scatter over gloo sends only what is kept" in shown
    lines = {(line["mode"], line["name"]): line for line in json.loads(path.read_text())}
    shipped, same = lines["none", "DTensor"], lines["none", "DTensor, our collective"]
    assert shipped["held_bytes"] == same["held_bytes"] and same["combined_seconds"] > 0
    assert lines["elementwise", OURS]["held_bytes"] < lines["selective", OURS]["held_bytes"]


def collectives_on_ranks(name):
    """Outputs and gradients of a peer's layer as shipped and with our reduce-scatter, and how many were ours."""
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


def test_with_our_collective_dtensor_computes_the_same(pools):
    for of_output, of_gradient, of_torch, ours in pools[2].run(collectives_on_ranks, "DTensor"):
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
    monkeypatch.setitem(PEERS, "FSDP2", uncut)
    monkeypatch.setitem(PEERS, "another", failing(ValueError("first line\nsecond line")))
    with emulated_rank(4, real_tensors=True):
        ranks = Ranks(0, 4, "cpu", True)
        lines = measure_peers(
            ModelShape(16, 1, 32, 4), ranks, torch.float32, rounds=3, peers=tuple(PEERS), modes=["none"]
        )
    ours, dtensor, fsdp, another = lines
    assert ours["name"] == OURS and not ours["unavailable"]
    assert (dtensor["unavailable"], another["unavailable"]) == ("not here", "ValueError: first line")
    assert ours.keys() == dtensor.keys() and fsdp["sequences"] == 4
    assert fsdp["ours"]["low"] <= fsdp["ours"]["value"] <= fsdp["ours"]["high"]
