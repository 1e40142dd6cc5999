"""Bytes that really leave a process: what the kernel says that its TCP sockets have sent.

gloo's ranks are joined by TCP, also on one machine, and Linux counts the payload of each
connection, without the headers of TCP and IP.  So "the same bytes" (2205.05198 section 4.2.2) can
be read off the sockets, below torch and below gloo.  gloo adds headers, whose bytes follow from
how it cuts a tensor into messages, and nothing else.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable

import torch.distributed as dist

from actmem.formulas.communication import Exchange

#: Before each of gloo's messages: length, kind, slot, and where in which buffer.
GLOO_HEADER_BYTES = 6 * 8
#: For each piece of data that goes to another rank: "I have it", "I am ready for it", and the data itself.
GLOO_MESSAGES = 3
#: gloo cuts a tensor that is to be all-reduced into pieces of no more than this, two for each rank at least.
GLOO_PIECE_BYTES = 1 << 20
#: Where Linux's struct tcp_info has tcpi_bytes_sent and tcpi_bytes_retrans, two 64-bit numbers (since kernel 4.19).
_SENT_AND_AGAIN = (200, "QQ")
#: A socket hands over to the network on its own time: the count stands still for this long when all has left.
_STILL_SECONDS = 0.02


def gloo_header_bytes(exchange: Exchange) -> int:
    """Bytes that one rank sends beside the data of ``exchange``, when gloo runs it.

    all-reduce: a ring's 2(t - 1) turns with 1/t of the pieces each.  all-gather: t - 1 turns with two
    pieces each.  reduce-scatter: a piece to each other rank (``parallel.gloo``).
    """
    t = exchange.ranks
    pieces = max(2 * t, t * math.ceil(exchange.payload_bytes / GLOO_PIECE_BYTES / t))
    sent = {"all-reduce": 2 * (t - 1) * pieces // t, "all-gather": 2 * (t - 1), "reduce-scatter": t - 1}[exchange.kind]
    return exchange.count * sent * GLOO_MESSAGES * GLOO_HEADER_BYTES


def can_count() -> bool:
    """Whether this process's ranks talk over sockets that can be asked: gloo on Linux."""
    return sys.platform == "linux" and dist.is_initialized() and dist.get_backend() == "gloo"


def socket_bytes_sent() -> int:
    """Payload bytes that this process's open TCP sockets have sent since they were opened."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as asked:  # a copy, so that closing it closes nothing
                told = asked.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # gone since it was listed, or not TCP
            continue
        offset, numbers = _SENT_AND_AGAIN
        sent, again = struct.unpack_from(numbers, told, offset)
        total += sent - again
    return total


def bytes_sent_by(exchange: Callable[[], object]) -> int:
    """Payload bytes that this rank's sockets send while ``exchange`` runs.  Every rank must call it at once."""
    exchange()  # connections that are made on first use are made now
    dist.barrier()
    before = _still()
    dist.barrier()
    # The barrier's own messages are the same each time; what is sent for it and nothing else is taken off.
    between = _still()
    exchange()
    dist.barrier()
    return _still() - between - (between - before)


def _still() -> int:
    """The count once it stands still."""
    count = socket_bytes_sent()
    while True:
        time.sleep(_STILL_SECONDS)
        now = socket_bytes_sent()
        if now == count:
            return now
        count = now
