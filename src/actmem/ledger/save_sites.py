"""Find out who saves a tensor: the running module, the operation, the argument, the line of code.

A saved-tensor hook gets nothing but the tensor. But it is called while the operation runs. So OperationTracker keeps a
stack of the torch functions and autograd Functions that are running; the top of the stack saves the tensor.
"""

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import FrameType
from typing import Any
from weakref import WeakSet

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.overrides import TorchFunctionMode

from actmem import drop, keep, recompute
from actmem.ledger.storages import plain_tensors, replaced, storage_of, storages_in, storages_of, tensors_in
from actmem.torch_private import node_running

#: The folders of torch and of the ledger, and the files that save, drop and recompute tensors for a layer: a frame in
#: them is not the code that a reader looks for. The layers' own lines are.
_FOLDERS = [os.path.dirname(file) + os.sep for file in (torch.__file__, __file__)]
_NOT_THEIRS = (*_FOLDERS, drop.__file__, keep.__file__, recompute.__file__)
UNKNOWN = "unknown"


class RunningModules:
    """A stack of the modules that are running, with the names that ``module.named_modules()`` gives them.

    A submodule may have several names, as with shared weights. The stack then has the name under which the submodule is
    found in the module that is running around it.

    Args:
        module: the root module, in which the names begin.
    """

    def __init__(self, module: nn.Module):
        self._parts_of = {id(module): _names_in(module)}
        self._root = id(module)
        self._running: list[tuple[nn.Module, str, str]] = []

    def __bool__(self) -> bool:
        return bool(self._running)

    @property
    def name(self) -> str:
        """Name of the innermost running module, as in ``named_modules``; "" for the root, and if none runs."""
        return self._running[-1][1] if self._running else ""

    @property
    def name_or_node(self) -> str:
        """Name of the innermost running module; in backward, of the autograd node that runs.

        If that node runs a module, as the node of a checkpoint does, the name is the innermost module's.
        """
        node = node_running()
        return self.name if self._running and self._running[-1][2] == node else node

    def enter(self, part: nn.Module) -> None:
        """Note that the forward pass of the submodule ``part`` begins."""
        names = self._parts_of[self._root]
        part_name = names.get(id(part), type(part).__name__)
        outer = next(((module, name) for module, name, _ in reversed(self._running) if id(module) in names), None)
        if outer is not None:
            if id(outer[0]) not in self._parts_of:
                self._parts_of[id(outer[0])] = _names_in(outer[0])
            names_in_outer = self._parts_of[id(outer[0])]
            if id(part) in names_in_outer:
                part_name = ".".join(filter(None, (outer[1], names_in_outer[id(part)])))
        self._running.append((part, part_name, node_running()))

    def leave(self, part: nn.Module) -> None:
        """Note that the forward pass of ``part`` has ended: take ``part``, and all modules above it, off the stack.

        If ``part`` is not on the stack, because it was running before the tracking began, the stack is emptied.
        """
        while self._running and self._running.pop()[0] is not part:
            pass


def _names_in(module: nn.Module) -> dict[int, str]:
    return {id(part): name for name, part in module.named_modules()}


def is_compiled(model: nn.Module) -> bool:
    """Return whether the model or a module in it is compiled by torch.compile."""
    places = (
        place
        for module in model.modules()
        for place in (module, module.forward, getattr(module, "_compiled_call_impl", None))
    )
    return any(hasattr(place, "_torchdynamo_orig_callable") for place in places)


class OperationTracker(TorchFunctionMode):
    """A context that tracks which modules and which torch functions are running.

    Args:
        module: the root module; its submodules are named as in its ``named_modules()``.
        follows_functions: False tracks modules only, without a TorchFunctionMode. Use False for compiled models: under
            such a mode torch compiles a checkpoint's second run differently from its first.

    Attributes:
        weights: the storages of the module's parameters and buffers.
        inputs: the storages of all inputs of outermost modules.
        outputs: the storages of all outputs of outermost modules.
        input_tensors: weak references to the tensors of these inputs.
        output_tensors: weak references to the tensors of these outputs.
        checkpoint_ran: True once one of torch's checkpoints ran, which can hold tensors that hooks don't see.
        ran: the modules that ran, of this root or not.
    """

    def __init__(self, module: nn.Module, follows_functions: bool = True):
        super().__init__()
        self._follows_functions = follows_functions
        self.weights = storages_of(*module.parameters(), *module.buffers())
        self._modules = RunningModules(module)
        self._operations: list[tuple[Any, tuple, dict, FrameType]] = []
        self._handed_over: tuple[str, WeakSet[torch.UntypedStorage]] = "", WeakSet()
        self._patches = ExitStack()
        self.inputs: WeakSet[torch.UntypedStorage] = WeakSet()
        self.outputs: WeakSet[torch.UntypedStorage] = WeakSet()
        self.input_tensors: list[weakref.ref[Tensor]] = []
        self.output_tensors: list[weakref.ref[Tensor]] = []
        self.checkpoint_ran = False
        self.ran: WeakSet[nn.Module] = WeakSet()

    @property
    def module(self) -> str:
        """Name of the innermost running module, as in ``named_modules()``; "" for the root."""
        return self._modules.name

    @property
    def inside(self) -> bool:
        """True while a module or an autograd Function runs."""
        return bool(self._modules) or any(isinstance(operation[0], type) for operation in self._operations)

    def __enter__(self):
        hooks = torch.nn.modules.module
        for handle in (
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, with_kwargs=True, always_call=True),
        ):
            self._patches.callback(handle.remove)
        self._patches.enter_context(replaced(Function, "apply", self._seen))
        self._patches.enter_context(replaced(FunctionCtx, "save_for_backward", self._note_handed_over))
        return super().__enter__() if self._follows_functions else self

    def __exit__(self, *error):
        self._patches.close()
        return super().__exit__(*error) if self._follows_functions else None

    def _enter_module(self, module, args) -> None:
        if not torch.compiler.is_compiling():
            self._modules.enter(module)
            self.ran.add(module)

    def _leave_module(self, module, args, *rest) -> None:
        if torch.compiler.is_compiling():
            return
        kwargs, output = rest if len(rest) == 2 else ({}, *rest)  # torch leaves kwargs out if forward failed
        self._modules.leave(module)
        if not self._modules:
            for value, storages, tensors in (
                ((args, kwargs), self.inputs, self.input_tensors),
                (output, self.outputs, self.output_tensors),
            ):
                storages.update(storages_in(value))
                tensors.extend(map(weakref.ref, tensors_in(value)))

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # the compiler reads this function too, and must not stumble
            return func(*args, **kwargs)
        return self._running_as(func, args, kwargs, func)

    def _running_as(self, name: Any, args: tuple, kwargs: dict, function: Callable) -> Any:
        self._operations.append((name, args, kwargs, sys._getframe(2)))
        try:
            return function(*args, **kwargs)
        finally:
            self._operations.pop()

    def _seen(self, apply) -> classmethod:
        """Wrap ``apply`` of all autograd Functions so that each call is on the stack of operations."""

        def run(cls, *args, **kwargs):
            self.checkpoint_ran |= cls.__module__ == torch.utils.checkpoint.__name__
            return self._running_as(cls, args, kwargs, apply.__get__(None, cls))

        return classmethod(run)

    def _note_handed_over(self, save_for_backward: Callable) -> Callable:
        def note(ctx, *tensors):
            self._handed_over = type(ctx).__name__.removesuffix("Backward"), storages_of(*tensors)
            return save_for_backward(ctx, *tensors)

        return note

    def saver_of(self, tensor: Tensor) -> tuple[str, str, str]:
        """Return which operation is saving ``tensor``. Call this from a saved-tensor hook.

        A Function whose ``apply`` was looked up before this tracker began (``square = Square.apply``) is not on the
        stack of operations. It is still found if it was the last to call ``save_for_backward`` and did so with
        ``tensor``; the argument is then "unknown".

        Returns: a tuple of three strings. The operation's name, such as "linear"; "unknown" if it can't be found.
            Which argument of the operation the tensor is: "0", "1", …, a keyword, or the name given to ``keep``; "" if
            it is none. File and line of the call.
        """
        if self._operations:
            func, args, kwargs, frame = self._operations[-1]
            kept_name = args[-1] if func is keep.FUNCTIONS["keep"] and args and isinstance(args[-1], str) else ""
            return getattr(func, "__name__", UNKNOWN), kept_name or _argument_of(tensor, args, kwargs), line_of(frame)
        name, handed_over = self._handed_over
        line = line_of(sys._getframe(1))
        if storage_of(tensor) in handed_over:
            return name, UNKNOWN, line
        if in_checkpoint(sys._getframe(1)):
            self.checkpoint_ran = True
            return "checkpoint", "", line
        return UNKNOWN, "", line


def kept_as(op: str, argument: str) -> str:
    """Return the name under which ``keep`` saved a tensor; "" if it had none, or if another operation saved it.

    Args:
        op: the name of the operation that saved the tensor, from ``OperationTracker.saver_of``.
        argument: which argument the tensor is, from ``OperationTracker.saver_of``; for ``keep`` this is its name.
    """
    return argument if op == keep.FUNCTIONS["keep"].__name__ and not argument.isdigit() else ""


def in_checkpoint(frame: FrameType | None) -> bool:
    """Return whether ``frame`` or one of its callers runs code of torch's checkpoint, ``torch/utils/checkpoint.py``."""
    while frame is not None:
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            return True
        frame = frame.f_back
    return False


def line_of(frame: FrameType | None) -> str:
    """Return ``file:line`` of the innermost code of a layer or of the user, at ``frame`` or at its nearest such caller.

    Code of torch and of this file's folder is passed over, and what saves, drops and recomputes tensors for a layer. ""
    if there is no other code.
    """
    # One frame at a time: a list of them would hold this frame, and with it all their variables.
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THEIRS):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def view_of(tensor: Tensor) -> tuple:
    """Return a key by which to compare views of one storage: two that hold the same elements have the same key.

    So a tensor and its transpose have the same key. The key has the offset, and the sorted strides with their sizes.
    """
    try:
        return tensor.storage_offset(), tuple(sorted(zip(tensor.stride(), tensor.shape)))
    except (RuntimeError, NotImplementedError):  # a strided nested tensor has no single shape
        return (0, ())


def _argument_of(tensor: Tensor, args: tuple, kwargs: dict) -> str:
    """Return the place or the keyword of the argument that ``tensor`` is, such as "0"; "" if it is no argument.

    An argument that is the same view comes before one that only has the same storage.
    """
    storage, first = storage_of(tensor), ""
    for name, value in _named(args, kwargs) if storage is not None else ():
        for part in plain_tensors(value) if isinstance(value, Tensor) else ():
            if storage_of(part) is storage:
                if view_of(part) == view_of(tensor):
                    return name
                first = first or name
    return first


def _named(args: tuple, kwargs: dict) -> Iterator[tuple[str, Any]]:
    for i, value in enumerate(args):
        # A list of tensors, as ``cat`` takes it, is one argument.
        yield from ((str(i), item) for item in (value if isinstance(value, (list, tuple)) else (value,)))
    yield from kwargs.items()
