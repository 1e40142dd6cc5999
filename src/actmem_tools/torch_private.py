"""Every private or undocumented name of torch that the tools use, beside those of ``actmem`` and ``actmem_more``.

- ``torch.library._scoped_library``, ``OpOverload._op_dk``, ``torch._C.DispatchKey``: operations of another device
- ``torch._decomp``: backward of a GPU's RMSNorm
- ``torch._C.DisableTorchFunctionSubclass``: to call torch without the overrides of tensor subclasses
- ``torch._subclasses.fake_tensor``, ``torch._C._DisableTorchDispatch``: fake tensors, how to make one, and the
exceptions that they raise because they have no values
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

#: Name of the autograd node that adds a gradient to a leaf tensor's ``.grad``.
WEIGHTS_NODE = "torch::autograd::AccumulateGrad"


def torch_release() -> tuple[int, int]:
    """Return the installed torch's version as (major, minor): (2, 13) for torch 2.13.0."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def is_fake(tensor: Tensor) -> bool:
    """Return whether this is one of torch's fake tensors, which have a shape and a dtype and no values."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def fake_tensor(like: Any, is_view: bool, shape: torch.Size, stride: tuple, offset: int, dtype: torch.dtype) -> Tensor:
    """Make a fake tensor on the device of another one; a view has the other one's storage."""
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
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    return isinstance(error, (DataDependentOutputException, DynamicOutputShapeException))


def rms_norm_backward() -> Callable:
    """Return torch's own code of backward of ``rms_norm``, which runs on every device."""
    from torch._decomp import decomposition_table

    return decomposition_table[torch.ops.aten._fused_rms_norm_backward.default]


@contextmanager
def replaced_operations(*replacements: tuple[str, str, Callable[[Callable], Callable]]) -> Iterator[None]:
    """Make a context in which functions of ours replace some of torch's operations on one kind of device.

    They replace the operation itself, so calls from C++ and by any Python name reach them too.

    Args:
        replacements: of each operation three things.  Where: "AutogradCPU" or "AutogradCUDA", or "CPU" for an operation
            whose gradient torch knows.  Its name, as ``scaled_dot_product_attention``.  And a function that takes what
            torch runs where a device has no kernel of its own, and returns what runs in its place.
    """
    without_kernel = torch._C.DispatchKey.CompositeImplicitAutograd
    with torch.library._scoped_library("aten", "IMPL") as library:
        for key, name, make in replacements:
            original = partial(getattr(torch.ops.aten, name).default._op_dk, without_kernel)
            library.impl(name, make(original), key)
        yield
