"""Who is saving a tensor: the running module, the operation, the argument, the line of code.

A saved-tensor hook is told nothing but the tensor.  It is called from inside the operation,
though, so the Python stack above it says the rest: either a torch function, seen through
OperationTracker, or ``apply`` of an autograd Function.
"""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_TORCH = os.path.dirname(torch.__file__)
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_FUNCTION_APPLY = torch.autograd.Function.apply.__func__.__code__


class OperationTracker(TorchFunctionMode):
    """Leaves a stack frame for each torch function that runs, and follows the running module."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._names = {id(child): name for name, child in module.named_modules()}
        self._running: list[str] = []

    @property
    def module(self) -> str:
        """Name of the innermost running module, as ``named_modules`` has it; "" for the root."""
        return self._running[-1] if self._running else ""

    def __enter__(self):
        self._handles = [
            torch.nn.modules.module.register_module_forward_pre_hook(self._enter_module),
            torch.nn.modules.module.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *error):
        for handle in self._handles:
            handle.remove()
        return super().__exit__(*error)

    def _enter_module(self, module, args) -> None:
        self._running.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, module, args, output) -> None:
        self._running.pop()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


_HANDLER = OperationTracker.__torch_function__.__code__


def saver_of(tensor: Tensor) -> tuple[str, str, str]:
    """Operation, argument and line of the call that is saving ``tensor`` right now.

    Call it from a saved-tensor hook, inside an OperationTracker.
    """
    op = argument = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not op and frame.f_code is _HANDLER:
            func, args, kwargs = (frame.f_locals[name] for name in ("func", "args", "kwargs"))
            op, argument = func.__name__, _argument_of(tensor, args, kwargs)
        elif not op and frame.f_code is _FUNCTION_APPLY:
            op = frame.f_locals["cls"].__name__
            argument = _argument_of(tensor, frame.f_locals["args"], frame.f_locals["kwargs"])
        elif op and not frame.f_code.co_filename.startswith(_TORCH):
            return op, argument, f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return op, argument, ""


def _argument_of(tensor: Tensor, args: tuple, kwargs: dict | None) -> str:
    """Which argument ``tensor`` is: the same view of the same storage, or else the same storage."""
    named = [(str(i), arg) for i, arg in enumerate(args)] + list((kwargs or {}).items())
    tensors = [(name, arg) for name, arg in named if isinstance(arg, Tensor) and not _is_wrapper(arg)]
    storage = tensor.untyped_storage()._cdata
    same = [(name, arg) for name, arg in tensors if arg.untyped_storage()._cdata == storage]
    for name, arg in same:
        if (arg.storage_offset(), arg.shape, arg.stride()) == (tensor.storage_offset(), tensor.shape, tensor.stride()):
            return name
    return same[0][0] if same else ""


def _is_wrapper(tensor: Tensor) -> bool:
    return torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
