"""Private names of torch with which each thread has process groups of its own, as a rank has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def world_of_each_thread() -> Iterator[None]:
    """In the block each thread has process groups of its own, and a default one if it makes it."""
    from torch.testing._internal.distributed.multi_threaded_pg import ThreadLocalWorld

    c10d: Any = torch.distributed.distributed_c10d
    before, c10d._world = c10d._world, ThreadLocalWorld()
    private: Any = torch._C._distributed_c10d  # no stub has the name
    isolate = private._set_thread_isolation_mode
    isolate(True)
    try:
        yield
    finally:
        isolate(False)
        c10d._world = before


def name_of_group(group: torch.distributed.ProcessGroup) -> str:
    """The name under which this thread's torch.distributed has a group."""
    return torch.distributed.distributed_c10d._world.pg_names[group]
