"""The private or undocumented names of torch that ``actmem_tools`` uses.  ``actmem`` and ``actmem_more`` have theirs.

- ``torch._C.DisableTorchFunctionSubclass``: to call torch without the overrides of tensor subclasses
- ``torch._subclasses.fake_tensor``, ``torch._C._DisableTorchDispatch``: fake tensors, how to make one, and the
exceptions that they raise because they have no values
"""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor

#: Name of the autograd node that adds a gradient to a leaf tensor's ``.grad``.
WEIGHTS_NODE = "torch::autograd::AccumulateGrad"


def torch_release() -> tuple[int, int]:
    """Return the installed torch's version as (major, minor): (2, 13) for torch 2.13.0."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def is_fake(tensor: Tensor) -> bool:
    """Return whether this is one of torch's fake tensors, which have a shape and a dtype and no values."""
    return isinstance(tensor, FakeTensor)


def fake_tensor(like: Any, is_view: bool, shape: torch.Size, stride: tuple, offset: int, dtype: torch.dtype) -> Tensor:
    """Make a fake tensor on the device of ``like``.

    Args:
        like: a fake tensor.
        is_view: whether the new tensor shares the storage of ``like``; False gives it a storage of its own.
        shape: the new tensor's shape.
        stride: its strides.
        offset: where in the storage of ``like`` a view begins, in elements.
        dtype: its dtype.
    """
    with torch._C._DisableTorchDispatch():
        made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if is_view:
            made.set_(like.untyped_storage(), offset, shape, stride)
    return type(like)(like.fake_mode, made, like.fake_device)


def plain_tensors() -> AbstractContextManager:
    """Make a context in which torch ignores the ``__torch_function__`` of tensor subclasses."""
    return torch._C.DisableTorchFunctionSubclass()


def lacks_values(error: Exception) -> bool:
    """Return whether an exception was raised because an operation needs values and a fake tensor has none."""
    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))
