"""What ranks exchange in one layer: counted against the formula, sent by sockets, timed, and how much of it backward hides.

gloo connects its ranks by TCP, even on one machine, and Linux counts each connection's payload, without the headers
of TCP and IP.  So "the same bytes" (2205.05198 section 4.2.2) can be read from the sockets, below torch and below gloo.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from actmem.config import ModelShape, Parallel
from actmem.formulas.communication import Exchange, counts, layer_exchanges, wire_bytes
from actmem.ledger.comms import Collective, count_collectives
from actmem.ledger.parts import layer_input
from actmem.ledger.tools import replaced
from actmem.parallel import linear
from actmem.parallel.collectives import all_gather, all_reduce, reduce_scatter, torch_reduce_scatter
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem_course.bench.hold import layer_runner
from actmem_course.bench.measure_speed import group_of
from actmem_course.bench.race import Work, race
from actmem_course.others.ring import gloo_header_bytes
from actmem_course.ranks import Ranks
from actmem_course.results import ExchangeCount, SocketCount, TimedPair

#: torch's own reduce-scatter, which over gloo is an all-reduce.
TORCHS = "torch's reduce-scatter"

#: How a layer can be shared: the arguments of ``tensor_parallel`` for each.
FORMS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "tensor+sequence": {"sequence_parallel": True},
    "tensor+sequence, plain": {"sequence_parallel": True, "keep_gathered_input": True},
}
_COUNTED_MODES = ("none", "selective", "full", "paper-full")


def count_exchanges(shape: ModelShape, ranks: Ranks, dtype: torch.dtype) -> list[ExchangeCount]:
    """Count the collectives of one layer in every form and mode.  Every rank must call it."""
    found = []
    for name, options in FORMS.items():
        for recompute in _COUNTED_MODES:
            tp = tensor_parallel(**options)
            layer = layer_runner(shape, tp, ranks.device, dtype, recompute)
            with count_collectives() as seen:
                layer.run()
            by_formula = exchanges_by_formula(shape, tp, dtype, recompute)
            really = exchanges_of(seen.collectives, ranks.size)
            numbers = counts(by_formula), counts(really), wire_bytes(by_formula), wire_bytes(really)
            found.append(ExchangeCount(name, recompute, *numbers))
    return found


def exchanges_by_formula(
    shape: ModelShape, tp: TensorParallel, dtype: torch.dtype, recompute: str = "none"
) -> list[Exchange]:
    """What one layer exchanges, forward and backward, in the form that ``tp`` has."""
    parallel = Parallel(tp.size, tp.sequence_parallel)
    return layer_exchanges(shape, parallel, recompute, dtype.itemsize, keep_gathered_input=tp.keep_gathered_input)


def exchanges_of(collectives: list[Collective], ranks: int) -> list[Exchange]:
    """The counted collectives, as the formula names them."""
    return [
        Exchange(kind, "measured", "", ranks, payload, count)
        for (kind, payload), count in Counter((c.kind, c.payload_bytes) for c in collectives).items()
    ]


def measure_sent(shape: ModelShape, ranks: Ranks, dtype: torch.dtype) -> list[SocketCount]:
    """Single exchanges of a layer's activations, then the whole layer, forward and backward.

    Empty where sockets can't be read.  Every rank must call it, and gets the same.
    """
    if ranks.emulated or ranks.size == 1 or not can_count():
        return []
    tp = tensor_parallel(sequence_parallel=True)
    full = layer_input(shape, TensorParallel(), ranks.device, dtype).detach()
    shard = full[: shape.seq_length // ranks.size].contiguous()
    own_part = torch.empty_like(shard)

    def sent(name: str, exchanges: list[Exchange], run: Callable[[], object]) -> SocketCount:
        total, headers = sum(ranks.gather(bytes_sent_by(run))), sum(map(gloo_header_bytes, exchanges))
        return SocketCount(name, ranks.size * wire_bytes(exchanges), ranks.size * headers, total)

    def whole(kind: str) -> list[Exchange]:
        return [Exchange(kind, "forward", "", ranks.size, full.numel() * dtype.itemsize)]

    found = [
        sent("all-reduce", whole("all-reduce"), lambda: all_reduce(full, tp)),
        sent("all-gather", whole("all-gather"), lambda: all_gather(shard, tp)),
        sent("reduce-scatter", whole("reduce-scatter"), lambda: reduce_scatter(full, tp)),
        sent(TORCHS, whole("all-reduce"), lambda: torch_reduce_scatter(own_part, full)),
    ]
    for name, options in FORMS.items():
        form = tensor_parallel(**options)
        layer = layer_runner(shape, form, ranks.device, dtype)
        found.append(sent(f"layer, {name}", exchanges_by_formula(shape, form, dtype), layer.run))
    return found


def compare_collectives(
    shape: ModelShape,
    ranks: Ranks,
    dtype: torch.dtype,
    *,
    rounds: int,
    on_round: Callable[[int], None] = lambda n: None,
) -> TimedPair:
    """Time one all-reduce of a layer's activations against a reduce-scatter and an all-gather of the same."""
    tp = group_of(sequence_parallel=True)
    x = layer_input(shape, TensorParallel(), ranks.device, dtype).detach()
    one, other = "all-reduce", "reduce-scatter, all-gather"
    work = {
        one: Work(lambda: all_reduce(x, tp), lambda _: None),
        other: Work(lambda: all_gather(reduce_scatter(x, tp), tp), lambda _: None),
    }
    found = race(work, one, ranks, rounds=rounds, on_round=on_round)
    first, second = (found.medians(name)["combined_seconds"] for name in work)
    return TimedPair(one, other, first, second, found.over(other, one))


def compare_overlap(
    shape: ModelShape,
    ranks: Ranks,
    dtype: torch.dtype,
    *,
    sequence_parallel: bool,
    rounds: int,
    on_round: Callable[[int], None] = lambda n: None,
) -> TimedPair:
    """Time backward of one layer, and the same if it waits for each exchange at once."""
    tp = group_of(sequence_parallel)
    plain = layer_runner(shape, tp, ranks.device, dtype).work()
    full = layer_input(shape, TensorParallel(), ranks.device, dtype).detach()
    shard = full[: shape.seq_length // ranks.size].contiguous()

    def overlapped() -> None:
        """What overlaps in backward, alone: both column-parallel linears have it."""
        for _ in range(2):
            if sequence_parallel:
                all_gather(shard, tp)
                reduce_scatter(full, tp)
            else:
                all_reduce(full, tp)

    one, other, alone = "with overlap", "without", "exchanges alone"
    work = {one: plain, other: plain.under(without_overlap), alone: Work(overlapped, lambda _: None)}
    found = race(work, one, ranks, rounds=rounds, part="backward_seconds", on_round=on_round)
    first, second = (found.medians(name)["backward_seconds"] for name in (one, other))
    over = found.over(other, one)
    hidden = (second - first) / found.medians(alone)["forward_seconds"] if over.is_real else None
    return TimedPair(one, other, first, second, over, hidden)


@contextmanager
def without_overlap() -> Iterator[None]:
    """In the block, column-parallel linears wait for each collective of backward right after starting it.

    The same collectives and products run in the same order, but nothing overlaps.
    """
    with ExitStack() as stack:
        for name in ("start_all_gather", "start_reduce_scatter", "start_all_reduce"):
            stack.enter_context(replaced(linear, name, _waiting))
        yield


def _waiting(start: Callable) -> Callable:
    def start_and_wait(x, tp, **options):
        pending = start(x, tp, **options)
        pending.wait()
        return pending

    return start_and_wait


#: In Linux's struct tcp_info, since kernel 4.19: tcpi_bytes_sent and tcpi_bytes_retrans, 64-bit numbers after 200 bytes.
_INFO = struct.Struct("200xQQ")
#: Sockets send asynchronously: everything is out once the count has not changed for this long.
_SETTLING_SECONDS = 0.02


def can_count() -> bool:
    """Whether the ranks talk over sockets that count their bytes: gloo on Linux."""
    if sys.platform != "linux" or not dist.is_initialized() or dist.get_backend() != "gloo":
        return False
    with socket.socket() as unused:
        return len(_tcp_info(unused)) == _INFO.size


def socket_bytes_sent() -> int:
    """Payload bytes that this process's open TCP sockets have sent since they were opened.

    Without those to the store where the ranks met: what is asked there is no part of an exchange.
    """
    total, store = 0, int(os.environ.get("MASTER_PORT", 0))
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as copy:  # closing a copy closes nothing
                sent, again = _INFO.unpack(_tcp_info(copy))
                if copy.getpeername()[1] == store:
                    continue
        except OSError:  # gone since it was listed, or not TCP
            continue
        total += sent - again
    return total


def _tcp_info(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)


def bytes_sent_by(exchange: Callable[[], object]) -> int:
    """Payload bytes that this rank's sockets send while ``exchange`` runs.  All ranks must call it together."""
    exchange()  # opens the connections that are opened on first use
    dist.barrier()
    before = _settled_count()
    dist.barrier()
    # The barrier sends the same bytes each time; they are subtracted.
    between = _settled_count()
    exchange()
    dist.barrier()
    return _settled_count() - between - (between - before)


def _settled_count() -> int:
    """The count once it no longer changes."""
    count = socket_bytes_sent()
    while True:
        time.sleep(_SETTLING_SECONDS)
        now = socket_bytes_sent()
        if now == count:
            return now
        count = now
