"""Payload bytes that this process's TCP sockets have sent, as Linux counts them: below torch and below gloo.

gloo connects its ranks by TCP, even on one machine, and Linux counts each connection's payload, without the headers
of TCP and IP.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable

import torch.distributed as dist

#: In Linux's struct tcp_info, since kernel 4.19: tcpi_bytes_sent and tcpi_bytes_retrans, 64-bit numbers after
#: 200 bytes.
_INFO = struct.Struct("200xQQ")
#: Sockets send asynchronously: everything is out once the count has not changed for this long.
_SETTLING_SECONDS = 0.02


def can_count() -> bool:
    """Whether the ranks talk over sockets that count their bytes: gloo on Linux."""
    if sys.platform != "linux" or not dist.is_initialized() or dist.get_backend() != "gloo":
        return False
    with socket.socket() as unused:
        return len(_tcp_info(unused)) == _INFO.size


def bytes_sent_by(collective: Callable[[], object]) -> int:
    """Payload bytes that this rank's sockets send while ``collective`` runs.  All ranks must call it together."""
    collective()  # opens the connections that are opened on first use
    dist.barrier()
    before = _settled_count()
    dist.barrier()
    # The barrier sends the same bytes each time; they are subtracted.
    between = _settled_count()
    collective()
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


def socket_bytes_sent() -> int:
    """Payload bytes that this process's open TCP sockets have sent since they were opened.

    Without those to the store where the ranks met: what is asked there is no part of a collective.
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
