"""Private functions of torch with which every thread, a virtual rank, has its own process groups."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def world_of_each_thread() -> Iterator[None]:
    """Make a context in which each thread has its own process groups, and its own default group once it makes one."""
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
    """Return the name under which torch.distributed knows a process group of this thread."""
    return torch.distributed.distributed_c10d._world.pg_names[group]
