"""Bytes on the sockets: what gloo's ranks really send is the ring's formula and gloo's headers, to the byte."""

import pytest
import torch
import torch.distributed as dist

from actmem.config import ModelShape
from actmem.formulas.communication import Exchange
from actmem.measure.emulate import emulated_rank
from actmem.parallel.collectives import all_reduce
from actmem.parallel.groups import tensor_parallel
from actmem_course.bench import measure_communication as wire
from actmem_course.bench.measure_communication import TORCHS, bytes_sent_by, can_count, measure_sent
from actmem_course.others.ring import HEADER_BYTES, PIECE_BYTES, gloo_header_bytes
from actmem_course.ranks import Ranks


def sent(shape):
    assert can_count()
    return measure_sent(shape, Ranks(dist.get_rank(), dist.get_world_size(), "cpu", False), torch.float32)


@pytest.mark.parametrize("shape", [ModelShape(16, 1, 32, 4), ModelShape(64, 3, 96, 8)])
@pytest.mark.parametrize("size", [2, 4])
def test_the_sockets_sent_what_the_formulas_say(size, shape, pools):
    of_ranks = pools[size].run(sent, shape)
    assert all(found == of_ranks[0] for found in of_ranks)
    by_name = {one.name: one for one in of_ranks[0]}
    assert [one.difference for one in by_name.values() if not one.exact] == []
    data = {name: one.predicted_bytes for name, one in by_name.items()}
    payload = 4 * shape.seq_length * shape.micro_batch_size * shape.hidden_size
    assert data["all-reduce"] == data["all-gather"] + data["reduce-scatter"] == data[TORCHS] == 2 * (size - 1) * payload
    assert data["layer, tensor"] == data["layer, tensor+sequence, plain"] == 4 * data["all-reduce"]
    assert data["layer, tensor+sequence"] * 4 == data["layer, tensor"] * 5


def not_counted():
    wire._tcp_info, told = lambda connection: b"", wire._tcp_info
    try:
        return can_count(), measure_sent(ModelShape(16, 1, 32, 4), Ranks(0, 2, "cpu", False), torch.float32)
    finally:
        wire._tcp_info = told


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
