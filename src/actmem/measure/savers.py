"""Who is saving a tensor: the running module, the operation, the argument, the line of code.

A saved-tensor hook is told nothing but the tensor.  It is called from inside the operation,
though, so the Python stack above it says the rest: OperationTracker leaves a frame there for each
torch function, and for ``apply`` of each autograd Function.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from actmem.measure.replace import replaced
from actmem.torch_private import is_traceable_wrapper_subclass

#: Frames in these folders are no line of the user's.
_NOT_THEIRS = tuple(os.path.dirname(file) + os.sep for file in (torch.__file__, __file__))
UNKNOWN = "unknown"


def _run(func: Callable, call: Callable, args: tuple, kwargs: dict):
    """The frame that ``saver_of`` looks for: the torch function or the autograd Function, and its arguments."""
    return call(*args, **kwargs)


class OperationTracker(TorchFunctionMode):
    """Leaves a stack frame for each torch function that runs, and follows the running module."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._names = {id(child): name for name, child in module.named_modules()}
        self._running: list[str] = []
        self._handed_over: tuple[str, WeakSet[torch.UntypedStorage]] = "", WeakSet()
        self._patches = ExitStack()

    @property
    def module(self) -> str:
        """Name of the innermost running module, as ``named_modules`` has it; "" for the root."""
        return self._running[-1] if self._running else ""

    def __enter__(self):
        hooks = torch.nn.modules.module
        for handle in (
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ):
            self._patches.callback(handle.remove)
        self._patches.enter_context(replaced(Function, "apply", _seen))
        self._patches.enter_context(replaced(FunctionCtx, "save_for_backward", self._note_handed_over))
        return super().__enter__()

    def __exit__(self, *error):
        self._patches.close()
        return super().__exit__(*error)

    def _enter_module(self, module, args) -> None:
        self._running.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, module, args, output) -> None:
        self._running.pop()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return _run(func, func, args, kwargs or {})

    def _note_handed_over(self, save_for_backward: Callable) -> Callable:
        def note(ctx, *tensors):
            storages = [storage for storage in map(_storage_of, tensors) if storage is not None]
            self._handed_over = type(ctx).__name__.removesuffix("Backward"), WeakSet(storages)
            return save_for_backward(ctx, *tensors)

        return note

    def saver_of(self, tensor: Tensor) -> tuple[str, str, str]:
        """Operation, argument and line of the call that is saving ``tensor`` right now.

        Call it from a saved-tensor hook.  A Function whose ``apply`` was looked up before this tracker
        began (``square = Square.apply``) leaves no frame: then it is the one that handed ``tensor``
        over last, and the argument is "unknown".  So is an operation that nothing tells.
        """
        name, handed_over = self._handed_over
        op, argument = (name, UNKNOWN) if _storage_of(tensor) in handed_over else (UNKNOWN, "")
        line, found = "", False
        # One frame at a time: a list of them would hold this frame, and with it all their variables.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            if code is _run.__code__ and not found:
                func, args, kwargs = (frame.f_locals[name] for name in ("func", "args", "kwargs"))
                op, argument = getattr(func, "__name__", UNKNOWN), _argument_of(tensor, args, kwargs)
                line, found = "", True
            elif not line and not code.co_filename.startswith(_NOT_THEIRS):
                line = f"{os.path.basename(code.co_filename)}:{frame.f_lineno}"
            frame = frame.f_back
        return op, argument, line


def _seen(apply) -> classmethod:
    """``apply`` of all autograd Functions, with a frame of ours around it: from torch 2.14 on it has none."""
    return classmethod(lambda cls, *args, **kwargs: _run(cls, apply.__get__(None, cls), args, kwargs))


def _argument_of(tensor: Tensor, args: tuple, kwargs: dict) -> str:
    """Which argument ``tensor`` is: the same view of the same storage, or else the same storage."""
    storage = _storage_of(tensor)
    if args and isinstance(args[-1], str) and args[-1]:
        return args[-1]  # keep() says itself what it keeps
    named = [(str(i), arg) for i, arg in enumerate(args)] + list(kwargs.items())
    same = [(name, arg) for name, arg in named if storage is not None and _storage_of(arg) is storage]
    for name, arg in same:
        if (arg.storage_offset(), arg.shape, arg.stride()) == (tensor.storage_offset(), tensor.shape, tensor.stride()):
            return name
    return same[0][0] if same else ""


def _storage_of(value: object) -> torch.UntypedStorage | None:
    """A tensor's storage; None for anything else, and for tensors without one of their own (DTensor, sparse)."""
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        return None
    try:
        return value.untyped_storage()
    except RuntimeError:
        return None
