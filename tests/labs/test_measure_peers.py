"""measure_peers as a user starts it: every peer in every mode, and what cannot run is said."""

import json

import torch

from actmem.config import ModelShape
from actmem.measure.emulate import emulated_rank
from actmem_course.bench import measure_peers as peers
from actmem_course.bench.measure_peers import OURS, PEER_MODES, PEERS, measure_peers
from actmem_course.bench.peers import PeerUnavailable
from actmem_course.ranks import Ranks
from tests.labs.in_process import shown_in_80_columns

SCRIPT = "measure_peers.py"
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
            torchs = line["mode"] == "elementwise" and line["name"] == "DTensor"
            assert (torchs or line["name"] == "megatron-core") and line["unavailable"] in " ".join(shown.split())
            continue
        assert line["combined_seconds"] > 0 and line["peak_bytes"] >= line["held_bytes"] > 0
        assert (line["ours"] is None) == (line["name"] == OURS)
        assert (line["over"] is None) == (line["mode"] == "none")
    assert by_name["none", "DTensor"]["held_bytes"] > by_name["none", OURS]["held_bytes"]


def test_under_torchrun_elementwise_beside_selective(tmp_path):
    path = tmp_path / "peers.json"
    chosen = ["--recompute", "none", "--recompute", "selective", "--recompute", "elementwise", "--peer", "DTensor"]
    shown = " ".join(shown_in_80_columns(SCRIPT, *TINY, *chosen, "--json", path, processes=2).split())
    assert "ours, elementwise beside selective" in shown
    assert "its reduce-scatter over gloo sends only what is kept" in shown
    lines = {(line["mode"], line["name"]): line for line in json.loads(path.read_text())}
    assert [key for key, line in lines.items() if line["over_selective"] is not None] == [("elementwise", OURS)]
    assert lines["elementwise", OURS]["held_bytes"] < lines["selective", OURS]["held_bytes"]


def test_a_peer_that_fails_is_left_out(monkeypatch):
    def failing(error):
        def layer(*args, **options):
            raise error

        return layer

    monkeypatch.setitem(peers.PEERS, "DTensor", failing(PeerUnavailable("not here")))
    monkeypatch.setitem(peers.PEERS, "megatron-core", failing(ValueError("first line\nsecond line")))
    with emulated_rank(4, real_tensors=True):
        lines = measure_peers(
            ModelShape(16, 1, 32, 4), Ranks(0, 4, "cpu", True), torch.float32, rounds=3, modes=["none"]
        )
    ours, dtensor, megatron = lines
    assert ours.name == OURS and not ours.unavailable
    assert (dtensor.unavailable, megatron.unavailable) == ("not here", "ValueError: first line")
