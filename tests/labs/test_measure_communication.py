"""measure_communication: every collective is the formula's; times are never judged."""

from types import SimpleNamespace

import measure_communication as communication
import pytest
import torch
from measure_communication import SIZES, comparison_text, count_layers, without_overlap

from actmem.config import ModelShape
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.emulate import emulated_rank
from actmem.parallel import linear
from actmem.parallel.groups import tensor_parallel
from actmem_course.lab_tools import held_bytes
from actmem_course.lab_tools.timing import Sample, Timings
from actmem_course.ranks import Ranks
from tests.labs.in_process import lab_results, shown_in_80_columns

SCRIPT = "measure_communication.py"
SHAPE = ModelShape(16, 1, 32, 4)
TINY = ["--seq-length", 16, "--micro-batch-size", 1, "--hidden-size", 32, "--num-attention-heads", 4, "--rounds", 1]


def test_on_two_ranks(pools):
    lines = lab_results(pools[2], SCRIPT, *TINY)
    bandwidths = [line for line in lines if "bus" in line]
    compared = [line for line in lines if "comparison" in line]
    counted = [line for line in lines if "recompute" in line]
    assert [line["measured"] for line in counted[:1]] == [{"all-reduce": 4}]
    assert all(line["measured"] == line["predicted"] for line in counted) and len(counted) == 12
    assert len(bandwidths) == 3 * len(SIZES["cpu"])
    for line in bandwidths:  # on two ranks
        assert line["sent_bytes"] == line["bytes"] * (1 if line["kind"] == "all-reduce" else 1 / 2)
        assert line["bus"] == line["sent_bytes"] / line["seconds"] > 0
    assert len(compared) == 2 and all(line["first_seconds"] > 0 and line["second_seconds"] > 0 for line in compared)


def test_emulated_fits_eighty_columns_and_times_nothing():
    shown = shown_in_80_columns(SCRIPT, "--emulate", 8, "--model", "1T")
    assert "nothing is timed" in shown and "Every number, kind and byte agrees" in shown


def test_one_collective_more_is_seen(monkeypatch):
    class Chatty(TransformerLayer):
        def forward(self, x):  # type: ignore[override]  # called with x alone
            return linear.all_reduce(super().forward(x).detach(), tensor_parallel()) * x

    monkeypatch.setattr(held_bytes, "TransformerLayer", Chatty)
    with emulated_rank(2):
        counted = count_layers(SHAPE, Ranks(0, 2, "cpu", True), torch.float32)
    assert not any(row["exact"] for row in counted)


@pytest.mark.parametrize("starts", [["start_all_gather", "start_reduce_scatter"], ["start_all_reduce"]])
def test_without_overlap_each_collective_is_waited_for_at_once(starts, monkeypatch):
    """In backward of a column-parallel linear; what waits right after its start finds nothing left to wait for later."""
    log = []

    def noted(name, start):
        def run(x, tp, **options):
            log.append(name)
            pending = start(x, tp, **options)
            return SimpleNamespace(wait=lambda: log.append(f"{name} done") or pending.wait())

        return run

    def backward():
        layer = linear.ColumnParallelLinear(4, 4, tensor_parallel(sequence_parallel=len(starts) > 1))
        y = layer(torch.randn(2, 1, 4, requires_grad=True))
        log.clear()
        y.backward(torch.ones_like(y))
        return list(log)

    for name in starts:
        monkeypatch.setattr(linear, name, noted(name, getattr(linear, name)))
    with emulated_rank(2, real_tensors=True):
        overlapping = [word for name in starts for word in (name, f"{name} done")]
        assert backward() == overlapping
        with without_overlap():
            assert backward() == [word for name in starts for word in (name, f"{name} done", f"{name} done")]
        assert backward() == overlapping


@pytest.mark.parametrize(("rounds", "is_real"), [(6, True), (5, False)])
def test_the_hidden_share_is_said_only_if_there_is_a_difference(rounds, is_real, monkeypatch):
    """Backward takes 3 seconds with overlap and 4 without; the collectives alone take 2."""
    steps = {"with overlap": (1, 3), "without": (1, 4), "collectives alone": (2, 0)}

    def timed(work, ranks, *, rounds, part):
        return Timings({name: [Sample(*steps[name])] * rounds for name in work}, part)

    monkeypatch.setattr(communication, "time_in_turns", timed)
    with emulated_rank(2, real_tensors=True):
        row = communication.compare_overlap(SHAPE, Ranks(0, 2, "cpu", True), torch.float32, True, rounds)
    assert (row["first_seconds"], row["second_seconds"], row["hidden"]) == (3, 4, 0.5 if is_real else None)
    assert ("overlap hides 50% of the collectives' own time" in comparison_text(row)) == is_real
