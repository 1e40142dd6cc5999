"""The most bytes that one emulated pipeline rank holds from its fullest moment through the next backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from weakref import WeakSet

import torch
from torch import Tensor, nn

from actmem.config import ModelShape
from actmem.layers.gpt import GPT
from actmem.main_grad import gradient_of, use_main_gradients
from actmem.measure.ledger import plain_tensors
from actmem.parallel.groups import TensorParallel
from actmem.recipes import Recompute
from actmem.torch_private import TorchDispatchMode, tree_leaves


class _Alive(TorchDispatchMode):
    """Storages that operations made and that are still alive, by weak references."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: WeakSet[torch.UntypedStorage] = WeakSet()
        self._ignored: WeakSet[torch.UntypedStorage] = WeakSet()
        self.peak_bytes = 0

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages)

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """What exists before the step: in-place operations return it, but don't make it."""
        for tensor in tensors:
            self._ignored.add(tensor.untyped_storage())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            for part in plain_tensors(leaf) if isinstance(leaf, Tensor) else ():
                if part.untyped_storage() not in self._ignored:
                    self._storages.add(part.untyped_storage())
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return result


def measure_stage_peak(
    shape: ModelShape,
    tp: TensorParallel,
    layers: range,
    num_microbatches: int,
    *,
    recompute: Recompute | str = "none",
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[int, int]:
    """Bytes held after ``num_microbatches`` forward passes, and the most during the backward pass of the first.

    Without weights, main gradients and buffers.  A stage's output is freed once it is sent (2205.05198
    appendix B).  For one chunk on an emulated rank.
    """
    part = GPT(shape, tp, layers=layers, recompute=recompute, dtype=dtype)
    s, b, h = shape.seq_length, shape.micro_batch_size, shape.hidden_size
    own = s // tp.size if tp.sequence_parallel else s

    def arrives() -> Tensor:
        if part.is_first:
            return torch.randint(0, shape.vocab_size, (b, s))
        return torch.randn(own, b, h, dtype=dtype, requires_grad=True)

    def forward(x: Tensor) -> Tensor:
        y = part(x)
        return part.loss(y, torch.randint(0, shape.vocab_size, (b, s))) if part.is_last else y

    return measure_part_peak(part, arrives, forward, part.is_last, num_microbatches)


def measure_part_peak(
    part: nn.Module,
    arrives: Callable[[], Tensor],
    forward: Callable[[Tensor], Tensor],
    is_last: bool,
    num_microbatches: int = 1,
) -> tuple[int, int]:
    """As ``measure_stage_peak``, for any part of a model.  arrives: makes its input.  forward: its output, or the loss if is_last."""
    use_main_gradients(part)
    alive = _Alive()
    alive.ignore(tensor for p in part.parameters() for tensor in (p, gradient_of(p)) if tensor is not None)
    alive.ignore(part.buffers())
    outputs: list[Tensor] = []
    with alive:
        for _ in range(num_microbatches):
            y = forward(arrives())
            if not is_last:
                y.untyped_storage().resize_(0)
            outputs.append(y)
            del y
        kept = alive.bytes
        first = outputs.pop(0)
        gradient = None if is_last else torch.empty_like(first)
        alive.peak_bytes = 0
        first.backward(gradient)
    return kept, alive.peak_bytes
