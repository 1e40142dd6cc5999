"""Emulate one rank of many in one process: real code, and collectives that send nothing.

torch's fake backend completes every collective at once, with a result of the right shape and meaningless values (at
most a copy of this rank's input).  On a CPU the tensors are fake too: they have shapes, dtypes and storages with sizes,
but no memory, so a laptop can run a layer of the 1T model.  On a GPU they are real: real kernels and real memory on a
single device.  To measure times on a CPU, ask for real tensors.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from actmem.config import ConfigError, check_size, shown
from actmem.ledger.storages import replaced
from actmem.parallel import collectives
from actmem.torch_private import fake_store, fake_tensors


@contextmanager
def emulated_rank(world_size: int, rank: int = 0, device: str = "cpu", *, real_tensors: bool = False) -> Iterator[None]:
    """Let this process act as one rank of ``world_size`` while the block runs, in a fake default process group.

    Args:
        world_size: the number of ranks.
        rank: this process's number among them, from 0.
        device: "cpu", "cuda", or a GPU with its number, such as "cuda:0". On a CPU, or without a GPU, every
            tensor that the block creates is fake: it has a shape and a storage with a size, but no memory.
        real_tensors: True makes real tensors on a CPU too.

    Raises: ConfigError if ``rank`` is not from 0 to ``world_size`` − 1, if ``device`` is none of these, or if a process
        group already exists.
    """
    check_size("world_size", world_size)
    check_size("rank", rank, world_size - 1, least=0)
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(device)):
        raise ConfigError("device", f"must be cpu, cuda or a GPU with its number, as cuda:0, got {shown(device)}")
    if dist.is_initialized():
        raise ConfigError("emulate", "this process is already a rank of a real process group")
    dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=world_size)
    try:
        with ExitStack() as stack:
            if real_tensors or str(device) != "cpu" and torch.cuda.is_available():
                stack.enter_context(_written_results())
            else:
                stack.enter_context(fake_tensors())
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _written_results() -> Iterator[None]:
    """Make reduce-scatter write this rank's own part if the fake backend writes nothing.

    Before torch 2.13 it wrote nothing.  Unwritten memory can hold infinities and NaNs, which spread
    to every value and change how fast kernels run.
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
