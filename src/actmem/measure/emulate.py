"""One process plays one rank of many: real code, and exchanges that go nowhere.

torch's fake backend answers every collective at once with a tensor of the right shape and
meaningless values: at most a copy of what this rank gave.  On CPU the tensors are fake as well:
they have shapes, dtypes, storages with sizes and identities, and no memory, so a laptop can run
the layer of a 1T model.  On a GPU they are real: real kernels and real memory on a single
device.  To take times on a CPU, ask for real tensors there too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from actmem.config import ConfigError, check_size
from actmem.measure.replace import replaced
from actmem.parallel import collectives


@contextmanager
def emulated_rank(world_size: int, rank: int = 0, device: str = "cpu", *, real_tensors: bool = False) -> Iterator[None]:
    """Be rank ``rank`` of ``world_size`` while the block runs.

    Makes the default process group, so none may exist.  On ``"cpu"`` every tensor made inside is
    fake, unless ``real_tensors``.  Raises ConfigError on a bad size, or if a process group exists
    already.
    """
    # Private to torch, and the only place that imports them.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    check_size("world_size", world_size)
    if not 0 <= rank < world_size:
        raise ConfigError("rank", f"must be from 0 to {world_size - 1}, got {rank}")
    if dist.is_initialized():
        raise ConfigError("emulate", "this process is already a rank of a real process group")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        # Random-number states are real tensors even here.
        with FakeTensorMode(allow_non_fake_inputs=True) if device == "cpu" and not real_tensors else _written_results():
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _written_results() -> Iterator[None]:
    """Lets our reduce-scatter give this rank's own part where the fake backend leaves its result unwritten.

    Before torch 2.13 it does.  Unwritten memory can hold infinities and NaNs, which spread to
    every value and change how fast kernels run.
    """
    own, everything = torch.zeros(1), torch.ones(dist.get_world_size())
    collectives.torch_reduce_scatter(own, everything)
    if own.item() == 1:
        yield
        return

    def writing(reduce_scatter):
        def run(result: Tensor, x: Tensor, **options):
            result.copy_(x.chunk(dist.get_world_size(options["group"]))[dist.get_rank(options["group"])])
            return reduce_scatter(result, x, **options)

        return run

    with replaced(collectives, "torch_reduce_scatter", writing):
        yield


def is_emulated() -> bool:
    """True inside ``emulated_rank``: values that cross ranks mean nothing."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def available_device() -> str:
    """``"cuda"`` where torch finds a GPU, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"
