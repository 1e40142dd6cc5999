"""Every private or undocumented name of torch that the tools use, beside those of ``actmem`` and ``actmem_more``.

- ``torch.library._scoped_library`` and ``OpOverload.decompose``: attention as another device has it
- ``torch._C.DisableTorchFunctionSubclass``, and what fake tensors raise because they have no values
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

#: The node that adds a gradient to a weight's.
WEIGHTS_NODE = "torch::autograd::AccumulateGrad"


def torch_release() -> tuple[int, int]:
    """(2, 13) for torch 2.13.0."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def is_fake(tensor: Tensor) -> bool:
    """Whether a tensor has a shape and no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def plain_tensors() -> AbstractContextManager:
    """In the block no subclass of tensors has functions of its own."""
    return torch._C.DisableTorchFunctionSubclass()


def lacks_values(error: Exception) -> bool:
    """Whether fake tensors raised it because they have no values."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


@contextmanager
def attention_on(device: str, make: Callable[[Callable], Callable]) -> Iterator[None]:
    """In the block ``make(original)`` runs where attention is asked for on ``"CPU"`` or ``"CUDA"``.

    By whatever name, in Python or in C++.
    """
    original = torch.ops.aten.scaled_dot_product_attention.default.decompose
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("scaled_dot_product_attention", make(original), f"Autograd{device}")
        yield
