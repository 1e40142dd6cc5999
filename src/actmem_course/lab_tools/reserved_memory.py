"""What torch's caching allocator reserves for training steps, without a GPU.

The steps run on fake tensors, with all the code that the user would run: FSDP2's too. Each storage gets a block of the
model in ``actmem_course.others.allocator`` when it is made, and gives it back when it ends, so the order is the real
one. What a kernel allocates inside itself isn't seen.
"""

import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from actmem.ledger.modes import StepMode
from actmem.ledger.storages import StorageLifetimes, replaced, storages_in, tensors_in
from actmem.ledger.whole_step import loss_of
from actmem_course.others.allocator import CachingAllocator, MemoryBlock
from actmem_tools.load_model import run_forward


class ReservedMemory(StepMode):
    """Gives each storage that operations make in its ``with`` block a block of the modelled allocator.

    Each stream has blocks of its own, as in torch (``BlockComparatorSize`` in CUDACachingAllocator.cpp): FSDP2 gathers
    weights and reduces gradients on further streams.

    Args:
        existing: tensors that are there before.

    Attributes:
        peak: the most bytes that blocks in use had at a time, as ``max_memory_allocated`` counts.
    """

    def __init__(self, existing: Iterable[Tensor]):
        super().__init__()
        self._allocators: dict[object, CachingAllocator] = {}
        self._blocks: dict[int, tuple[CachingAllocator, MemoryBlock]] = {}
        self._allocated = self.peak = 0
        self.storages = StorageLifetimes(self._change)
        self._note(existing)

    @property
    def bytes(self) -> int:
        """What the allocator has reserved so far; it gives nothing back."""
        return sum(allocator.reserved for allocator in self._allocators.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = self.real_operation(func, args)(*args, **(kwargs or {}))
        self._note(result)
        return result

    def _note(self, value: Any) -> None:
        for storage in storages_in(value):
            if storage not in self.storages.numbers:
                self._change(self.storages.begin(storage), storage.nbytes())

    def _change(self, number: int, size: int | None) -> None:
        if number in self._blocks:
            allocator, block = self._blocks.pop(number)
            self._allocated -= block.size
            allocator.free(block)
        if size:
            # FSDP2 chooses its streams on a CPU as well.
            allocator = self._allocators.setdefault(torch.cpu.current_stream(), CachingAllocator())
            block = allocator.take("", size)
            self._blocks[number] = allocator, block
            self._allocated += block.size
            self.peak = max(self.peak, self._allocated)


def allocator_bytes(
    model: nn.Module, inputs: Any, optimizer: torch.optim.Optimizer, num_microbatches: int = 1
) -> tuple[int, int]:
    """Train until a further step reserves nothing more.

    Args:
        model: what is trained, of fake tensors.
        inputs: of each microbatch, as ``run_forward`` takes them.
        optimizer: makes its states in the first step.
        num_microbatches: of a step.

    Returns: the peak of what is allocated; what is reserved in the end. Both in bytes.
    """
    memory, before = ReservedMemory([*model.parameters(), *model.buffers(), *tensors_in(inputs)]), 0
    gc.disable()  # or storages in reference cycles would be freed at any moment
    try:
        with memory, replaced(torch.UntypedStorage, "resize_", memory.storages.resizing):
            while memory.bytes > before:
                before = memory.bytes
                for _ in range(num_microbatches):
                    loss_of(run_forward(model, inputs)).backward()
                optimizer.step()
                model.zero_grad()
    finally:
        gc.enable()
    return memory.peak, before
