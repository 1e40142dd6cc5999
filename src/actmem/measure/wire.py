"""Bytes that really leave a process: what the kernel says that its TCP sockets have sent.

gloo's ranks are joined by TCP, also on one machine, and Linux counts the payload of each
connection, without the headers of TCP and IP.  So "the same bytes" (2205.05198 section 4.2.2) can
be read off the sockets, below torch and below gloo.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable

import torch.distributed as dist

#: In Linux's struct tcp_info, since kernel 4.19: tcpi_bytes_sent and tcpi_bytes_retrans, 64-bit numbers behind 200 bytes.
_INFO = struct.Struct("200xQQ")
#: A socket hands over to the network on its own time: the count stands still for this long when all has left.
_STILL_SECONDS = 0.02


def can_count() -> bool:
    """Whether this process's ranks talk over sockets that can be asked: gloo on Linux."""
    if sys.platform != "linux" or not dist.is_initialized() or dist.get_backend() != "gloo":
        return False
    with socket.socket() as unused:
        return len(_told(unused)) == _INFO.size


def socket_bytes_sent() -> int:
    """Payload bytes that this process's open TCP sockets have sent since they were opened."""
    total = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(number))) as copy:  # closing a copy closes nothing
                sent, again = _INFO.unpack(_told(copy))
        except OSError:  # gone since it was listed, or not TCP
            continue
        total += sent - again
    return total


def _told(connection: socket.socket) -> bytes:
    return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)


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
