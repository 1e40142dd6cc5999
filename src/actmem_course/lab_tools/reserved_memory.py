"""Predict how much memory torch's caching allocator reserves for training steps, without a GPU.

The steps run on fake tensors, with all the code that a user would run, FSDP2 included. Each storage takes a block from
a model of the allocator (``actmem_course.others.allocator``) when it is made, and gives it back when it is freed, so
the order is that of a real run. What a kernel allocates internally isn't seen.
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
    """Simulates torch's caching allocator: gives memory to every storage that is made in its ``with`` block.

    Use it with fake tensors, to predict what a GPU reserves. Each stream has its own blocks, as in torch
    (``BlockComparatorSize`` in CUDACachingAllocator.cpp): FSDP2 gathers weights and reduces gradients on streams of
    their own.

    Args:
        existing: tensors that exist before the block, which get memory first.

    Attributes:
        peak: the most bytes of blocks in use at once, which is what ``max_memory_allocated`` counts.
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
        """The bytes that the allocator has reserved so far; it never returns any to the GPU."""
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
    """Run training steps until one more step reserves no more memory, and return how much is allocated and reserved.

    Args:
        model: a model whose parameters are fake tensors.
        inputs: the inputs of each microbatch: a tuple for ``model(*inputs)``, a dict for ``model(**inputs)``, any other
            value for ``model(inputs)``.
        optimizer: of the model's parameters.
        num_microbatches: how many microbatches a step has.

    Returns: the peak of the allocated bytes, and the reserved bytes after the last step.
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
