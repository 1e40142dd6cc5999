"""measure_communication: every exchange and every byte on the sockets is the formula's; times are never judged."""

import json
from types import SimpleNamespace

import measure_communication as communication
import pytest
import torch
import torch.distributed as dist
from measure_communication import TORCHS, comparison_text, count_layers, measure_sockets, without_overlap

from actmem.config import ModelShape
from actmem.formulas.communication import Exchange
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.emulate import emulated_rank
from actmem.parallel import linear
from actmem.parallel.collectives import all_reduce
from actmem.parallel.groups import tensor_parallel
from actmem_course.lab_tools import held_bytes, socket_bytes
from actmem_course.lab_tools.socket_bytes import bytes_sent_by, can_count
from actmem_course.lab_tools.timing import Sample, Timings
from actmem_course.others.ring import HEADER_BYTES, PIECE_BYTES, gloo_header_bytes
from actmem_course.ranks import Ranks
from tests.labs.in_process import shown_in_80_columns

SCRIPT = "measure_communication.py"
SHAPE = ModelShape(16, 1, 32, 4)
TINY = ["--seq-length", 16, "--micro-batch-size", 1, "--hidden-size", 32, "--num-attention-heads", 4, "--rounds", 1]


def test_on_two_ranks(tmp_path):
    path = tmp_path / "exchanges.json"
    shown = shown_in_80_columns(SCRIPT, *TINY, "--json", path, processes=2)
    assert "Every number, kind and byte agrees" in shown and "over gloo is an all-reduce that forgets the rest" in shown
    lines = json.loads(path.read_text())
    sent = [line for line in lines if "on_sockets" in line]
    compared = [line for line in lines if "comparison" in line]
    counted = [line for line in lines if "recompute" in line]
    assert [line["measured"] for line in counted[:1]] == [{"all-reduce": 4}]
    assert all(line["measured"] == line["predicted"] for line in counted) and len(counted) == 12
    assert all(line["sent_bytes"] == line["predicted_bytes"] + line["header_bytes"] > 0 for line in sent)
    assert len(sent) == 7 and all(line["exact"] for line in sent)
    titles = ["Same bytes", "Backward, tensor parallel", "Backward, tensor + sequence"]
    assert [line["comparison"] for line in compared] == titles and all(f"{title}: " in shown for title in titles)
    assert all(line["first_seconds"] > 0 and line["second_seconds"] > 0 for line in compared)
    assert all(line["over"]["ratio"] == pytest.approx(1 + line["over"]["value"]) for line in compared)


class Alike(Ranks):
    """Ranks that all say the same."""

    def gather(self, value):
        return [value] * self.size


def test_a_byte_more_on_the_sockets_is_named(monkeypatch, capsys):
    monkeypatch.setattr(communication, "can_count", lambda: True)
    monkeypatch.setattr(communication, "bytes_sent_by", lambda run: 1)
    with emulated_rank(2):
        sent = measure_sockets(SHAPE, Alike(0, 2, "cpu", False), torch.float32)
    assert not any(row["exact"] for row in sent)
    assert sent[0]["difference"] == "all-reduce: 4,096 + 1,152 bytes by formula, 2 on the sockets"


def test_emulated_fits_eighty_columns_and_times_nothing():
    shown = shown_in_80_columns(SCRIPT, "--emulate", 8, "--model", "1T")
    assert "nothing is timed" in shown and "Every number, kind and byte agrees" in shown


def test_one_exchange_more_is_seen(monkeypatch):
    class Chatty(TransformerLayer):
        def forward(self, x):  # type: ignore[override]  # called with x alone
            return linear.all_reduce(super().forward(x).detach(), tensor_parallel()) * x

    monkeypatch.setattr(held_bytes, "TransformerLayer", Chatty)
    with emulated_rank(2):
        counted = count_layers(SHAPE, Ranks(0, 2, "cpu", True), torch.float32)
    assert not any(row["exact"] for row in counted)


@pytest.mark.parametrize("starts", [["start_all_gather", "start_reduce_scatter"], ["start_all_reduce"]])
def test_without_overlap_each_exchange_is_waited_for_at_once(starts, monkeypatch):
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


def test_gradients_are_the_same_without_overlap(pools):
    for difference in pools[2].run(gradient_difference):
        assert difference == 0


def gradient_difference():
    torch.manual_seed(0)
    layer = TransformerLayer(SHAPE, tensor_parallel(sequence_parallel=True), p=0.0, dtype=torch.float64)
    x = torch.randn(8, 1, 32, dtype=torch.float64)

    def gradient():
        leaf = x.clone().requires_grad_()
        layer(leaf).sum().backward()
        return leaf.grad

    with without_overlap():
        waiting = gradient()
    return float((waiting - gradient()).abs().max())


@pytest.mark.parametrize("is_real", [True, False])
def test_the_hidden_share_is_said_only_if_there_is_a_difference(is_real, monkeypatch):
    """Backward takes 3 seconds with overlap and 4 without; the exchanges alone take 2."""
    steps = {"with overlap": (1, 3), "without": (1, 4), "collectives alone": (2, 0)}

    def timed(work, base, ranks, *, rounds, part):
        noise = 0.1 if is_real else 0.5
        return Timings({name: [Sample(*steps[name], 0)] * rounds for name in work}, noise, part)

    monkeypatch.setattr(communication, "time_in_turns", timed)
    with emulated_rank(2, real_tensors=True):
        row = communication.compare_overlap(SHAPE, Ranks(0, 2, "cpu", True), torch.float32, True, rounds=6)
    assert (row["first_seconds"], row["second_seconds"], row["hidden"]) == (3, 4, 0.5 if is_real else None)
    assert ("overlap hides 50% of the collectives' own time" in comparison_text(row)) == is_real


def sent(shape):
    assert can_count()
    return measure_sockets(shape, Ranks(dist.get_rank(), dist.get_world_size(), "cpu", False), torch.float32)


@pytest.mark.by_day(2)
@pytest.mark.parametrize("shape", [ModelShape(16, 1, 32, 4), ModelShape(64, 3, 96, 8)])
@pytest.mark.parametrize("size", [2, 4])
def test_the_sockets_sent_what_the_formulas_say(size, shape, pools):
    of_ranks = pools[size].run(sent, shape)
    assert all(found == of_ranks[0] for found in of_ranks)
    by_name = {row["name"]: row for row in of_ranks[0]}
    assert [row["difference"] for row in by_name.values() if not row["exact"]] == []
    data = {name: row["predicted_bytes"] for name, row in by_name.items()}
    payload = 4 * shape.seq_length * shape.micro_batch_size * shape.hidden_size
    assert data["all-reduce"] == data["all-gather"] + data["reduce-scatter"] == data[TORCHS] == 2 * (size - 1) * payload
    assert data["layer, tensor"] == data["layer, tensor+sequence, plain"] == 4 * data["all-reduce"]
    assert data["layer, tensor+sequence"] * 4 == data["layer, tensor"] * 5


def not_counted():
    socket_bytes._tcp_info, told = lambda connection: b"", socket_bytes._tcp_info
    try:
        return can_count(), measure_sockets(ModelShape(16, 1, 32, 4), Ranks(0, 2, "cpu", False), torch.float32)
    finally:
        socket_bytes._tcp_info = told


def test_an_older_system_is_not_asked(pools):
    assert pools[2].run(not_counted) == [(False, [])] * 2


def nothing_and_twice():
    x, tp = torch.ones(64), tensor_parallel()
    once = bytes_sent_by(lambda: all_reduce(x, tp))
    return bytes_sent_by(lambda: None), once, bytes_sent_by(lambda: (all_reduce(x, tp), all_reduce(x, tp)))


def test_a_second_exchange_is_seen(pools):
    for nothing, once, twice in pools[2].run(nothing_and_twice):
        assert nothing == 0 and twice == 2 * once > 2 * 256


def sent_for_mebibytes(n):
    x = torch.ones(n * PIECE_BYTES // 4)
    return bytes_sent_by(lambda: all_reduce(x, tensor_parallel()))


# Two ranks, two pieces each, or one for every MiB: each piece goes round twice, in three messages.
@pytest.mark.parametrize(("n", "pieces"), [(4, 4), (5, 6), (9, 10)])
def test_headers_grow_with_the_pieces(n, pieces, pools):
    exchange = Exchange("all-reduce", "forward", "", 2, n * PIECE_BYTES)
    assert gloo_header_bytes(exchange) == pieces * 3 * HEADER_BYTES
    assert pools[2].run(sent_for_mebibytes, n) == [exchange.wire_bytes + gloo_header_bytes(exchange)] * 2


def test_ranks_that_send_nothing_are_not_counted():
    assert not can_count()
    with emulated_rank(2):
        assert not can_count()
