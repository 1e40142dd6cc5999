"""Activation recomputation: the course's own checkpoint function (2205.05198 section 5).

How it works, in four rules:

1. Forward runs as always, with its graph, but each tensor that autograd wants to keep is
   replaced by a numbered slot.  Only the inputs and the random-number states are kept.
2. The first time backward opens a slot, the function runs again from the kept inputs and
   the kept random-number states, and the tensors it saves, in the same order, fill the slots.
3. The second run ends as soon as the last slot is filled.  What comes after that (often the
   region's last matrix product) makes only the output, which backward does not read.
   ``stop_early=False`` runs the region to its end, as the paper's cost counts it.
4. Afterwards the random-number generators stand where they stood before the second run.

Because the first graph stays, gradients are the same bits as without recomputation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from actmem.keep import keep


def checkpoint(
    function: Callable[..., Tensor],
    *inputs: Tensor,
    generators: Sequence[torch.Generator] = (),
    stop_early: bool = True,
) -> Tensor:
    """Run ``function(*inputs)`` and keep only its inputs for backward.

    generators: all the generators that ``function`` draws from; each is kept as one state
    (5,056 bytes on CPU, 16 on CUDA).  Keeps the storages of ``inputs`` and the states.
    ``function`` must do the same on the same inputs.  Raises RuntimeError in backward if its
    second run keeps other tensors than its first.
    """
    if not torch.is_grad_enabled():
        return function(*inputs)
    region = _Region(function, inputs, generators, stop_early)
    with saved_tensors_hooks(region.pack, _open):
        return function(*inputs)


class _AllSlotsFilled(Exception):
    """Ends the second run (rule 3)."""


class _Slot:
    """Stands for the n-th tensor that the region saved."""

    def __init__(self, region: _Region, index: int):
        self.region, self.index = region, index


def _open(slot: _Slot) -> Tensor:
    return slot.region.tensor(slot.index)


class _Region:
    """One checkpointed call: what to run again, from what, and the slots it fills."""

    def __init__(self, function, inputs, generators, stop_early):
        self.function, self.generators, self.stop_early = function, tuple(generators), stop_early
        self.autocast = _autocast_state()
        self.requires_grad = [x.requires_grad for x in inputs]
        self.kept = keep(*inputs, *(generator.get_state() for generator in self.generators))
        self.saved: list[tuple] = []  # shape and dtype of each slot's tensor
        self.found: dict[int, Tensor] = {}  # tensors of the second run, until read

    def pack(self, tensor: Tensor) -> _Slot:
        self.saved.append((tensor.shape, tensor.dtype))
        return _Slot(self, len(self.saved) - 1)

    def tensor(self, index: int) -> Tensor:
        if index not in self.found:
            self._run_again()
        # Each slot is read once in a backward pass, so a tensor is let go as soon as it is
        # read.  A second backward through a retained graph runs the region again.
        return self.found.pop(index)

    def _run_again(self) -> None:
        tensors = self.kept.tensors()
        inputs, states = tensors[: len(self.requires_grad)], tensors[len(self.requires_grad) :]
        inputs = [x.detach().requires_grad_(needs) for x, needs in zip(inputs, self.requires_grad)]
        self.found.clear()
        count = 0

        def fill(tensor: Tensor) -> None:
            nonlocal count
            if count == len(self.saved) or self.saved[count] != (tensor.shape, tensor.dtype):
                raise RuntimeError(
                    f"the second run of {_name(self.function)} saved {tuple(tensor.shape)} {tensor.dtype} "
                    f"as tensor {count + 1}; the first run saved {self._slot_text(count)}"
                )
            self.found[count] = tensor.detach()
            count += 1
            if self.stop_early and count == len(self.saved):
                raise _AllSlotsFilled

        with ExitStack() as stack:
            stack.enter_context(_generators_at(self.generators, states))
            for arguments in self.autocast:
                stack.enter_context(torch.autocast(**arguments))
            stack.enter_context(torch.enable_grad())
            stack.enter_context(saved_tensors_hooks(fill, _never))
            try:
                self.function(*inputs)
            except _AllSlotsFilled:
                pass
        if count != len(self.saved):
            raise RuntimeError(
                f"the second run of {_name(self.function)} saved {count} tensors, the first {len(self.saved)}"
            )

    def _slot_text(self, index: int) -> str:
        if index == len(self.saved):
            return "no more"
        shape, dtype = self.saved[index]
        return f"{tuple(shape)} {dtype}"


def _never(_: None) -> Tensor:
    raise RuntimeError("nothing reads the graph of the second run")


def _name(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _autocast_state() -> list[dict]:
    return [
        {"device_type": device, "dtype": torch.get_autocast_dtype(device), "enabled": torch.is_autocast_enabled(device)}
        for device in ("cpu", "cuda")
    ]


@contextmanager
def _generators_at(generators: Sequence[torch.Generator], states: Sequence[Tensor]):
    """Put each generator into a state, and back into its present one at the end (rule 4)."""
    before = [generator.get_state() for generator in generators]
    try:
        for generator, state in zip(generators, states):
            generator.set_state(state)
        yield
    finally:
        for generator, state in zip(generators, before):
            generator.set_state(state)
