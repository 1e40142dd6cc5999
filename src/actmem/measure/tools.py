"""What all counting needs: every tensor inside a value, its storages, a mode that disturbs nothing, a replaced function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from actmem.torch_private import TorchDispatchMode, is_traceable_wrapper_subclass

#: How deep ``tensors_in`` looks into objects that are no containers: a key-value cache is three deep.
_DEEPEST = 6
_NEVER_INSIDE = (nn.Module, ModuleType, FunctionType, type, str, bytes, int, float, torch.Generator)


def tensors_in(value: object, depth: int = _DEEPEST) -> Iterator[Tensor]:
    """The tensors in nested lists, dicts, dataclasses and plain objects, each once.

    A key-value cache or a Hugging Face ModelOutput is such an object.  Modules are not looked into.
    """
    return _inside(value, depth, set())


def _inside(value: object, depth: int, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if id(value) not in seen:
            seen.add(id(value))
            yield value
        return
    if depth < 0 or value is None or isinstance(value, _NEVER_INSIDE) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        inner: list = list(value.values())
    elif isinstance(value, (list, tuple, set, frozenset)):
        inner = list(value)
    else:
        inner = list(getattr(value, "__dict__", {}).values())
    for one in inner:
        yield from _inside(one, depth - 1, seen)


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that hold the data: ``tensor`` itself, the parts of a sparse one, or what a wrapper such as DTensor wraps."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            inner = getattr(tensor, name)
            if isinstance(inner, Tensor):  # DTensor lists its device mesh as well
                yield from plain_tensors(inner)
    elif tensor.layout is torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        yield from (tensor.crow_indices(), tensor.col_indices(), tensor.values().detach())
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        yield from (tensor.ccol_indices(), tensor.row_indices(), tensor.values().detach())
    else:
        yield tensor


def storages_in(value: object) -> list[torch.UntypedStorage]:
    """The storages of all tensors in ``value``; those that have none of their own are left out."""
    found: list[torch.UntypedStorage] = []
    for tensor in tensors_in(value):
        found.extend(storage for storage in map(storage_of, inner_tensors(tensor)) if storage is not None)
    return found


def storages_of(*tensors: Tensor) -> WeakSet[torch.UntypedStorage]:
    """The storages that hold the data of ``tensors``, held weakly."""
    return WeakSet(storages_in(tensors))


def storage_of(value: object) -> torch.UntypedStorage | None:
    """A tensor's storage; None for anything else, and for tensors without one of their own (DTensor, sparse)."""
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value):
        return None
    try:
        return value.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's shape; of a strided nested tensor, which has no single one, its number of elements."""
    try:
        return tuple(tensor.shape)
    except RuntimeError:
        return (tensor.untyped_storage().nbytes() // tensor.dtype.itemsize,)


@contextmanager
def replaced(owner: object, name: str, make: Callable[[Callable], object]) -> Iterator[None]:
    """Replace ``owner.name`` by ``make(original)`` while the block runs.

    owner: a module or a class; a static method stays one.
    """
    original = vars(owner)[name]
    if isinstance(original, staticmethod):
        function: Any = make(original.__func__)
        new: object = staticmethod(function)
    else:
        new = make(original)
    setattr(owner, name, new)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def noting_states(note: Callable[[Tensor], object], *others: tuple[object, str]) -> Iterator[None]:
    """In the block, ``note`` gets each state of a generator, which no operation makes.

    others: functions besides torch's that return states, as owner and name.
    """

    def make(get_state):
        def noting(*args, **kwargs):
            found = get_state(*args, **kwargs)
            for state in tensors_in(found):
                note(state)
            return found

        return noting

    with ExitStack() as stack:
        for owner, name in ((torch, "get_rng_state"), (torch.random, "get_rng_state"), *others):
            stack.enter_context(replaced(owner, name, make))
        yield


def settled(count: Callable[[], int]) -> int:
    """``count()``, once it no longer changes.

    gloo's threads free a tensor a moment after its exchange ends, so an immediate count can
    include the last one.  It never misses one: a count of zero is right at once.
    """
    number = count()
    if number and dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        unchanged_since = time.monotonic()
        while time.monotonic() - unchanged_since < 0.1:
            time.sleep(0.005)
            if (now := count()) != number:
                number, unchanged_since = now, time.monotonic()
    return number


class QuietDispatchMode(TorchDispatchMode):
    """A TorchDispatchMode under which torch.compile still compiles, and operators of a higher order still run."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:  # torch 2.9 knows no other way
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """``plain_tensors``, or none where the tensor can't be looked into."""
    try:
        return list(plain_tensors(tensor))
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return []
