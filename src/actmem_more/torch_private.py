"""Every private or undocumented name of torch that this package uses, beside those of ``actmem``.

- ``torch.ops.aten``: attention's kernels; ``scaled_dot_product_attention`` hides what they return
- ``torch.library._scoped_library``, ``OpOverload._op_dk``, ``torch._C.DispatchKey``: operations of another device
- ``torch._decomp``: backward of a GPU's RMSNorm
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
cudnn_attention = torch.ops.aten._scaled_dot_product_cudnn_attention
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention


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
