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
    """Return torch's function for the backward of ``rms_norm``, written in operations that every device has."""
    from torch._decomp import decomposition_table

    return decomposition_table[torch.ops.aten._fused_rms_norm_backward.default]


@contextmanager
def replaced_operations(*replacements: tuple[str, str, Callable[[Callable], Callable]]) -> Iterator[None]:
    """Replace some of torch's operations by functions of ours inside a ``with`` statement.

    The replacement is made in torch's dispatcher, so calls from C++ and by any Python name run it too.

    Args:
        replacements: for each operation a tuple (dispatch key, name, make).
            The key: "AutogradCPU" or "AutogradCUDA" to replace forward and backward of an operation that torch composes
            of others; "CPU" to replace only the kernel of one for which torch has a derivative formula.
            The name: the operation's in ATen, such as "scaled_dot_product_attention".
            ``make``: a function that takes torch's CompositeImplicitAutograd version of the operation, and returns the
            new function.
    """
    without_kernel = torch._C.DispatchKey.CompositeImplicitAutograd
    with torch.library._scoped_library("aten", "IMPL") as library:
        for key, name, make in replacements:
            original = partial(getattr(torch.ops.aten, name).default._op_dk, without_kernel)
            library.impl(name, make(original), key)
        yield
