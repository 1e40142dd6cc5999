"""Tools of every count of bytes: find tensors and their storages inside a value, follow a storage until it is freed,
replace a function for a while.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn

from actmem import recompute
from actmem.torch_private import is_traceable_wrapper_subclass, no_dispatch_modes

#: How deep ``tensors_in`` looks into objects that are no containers: a key-value cache is three deep.
_DEEPEST = 6
_NEVER_INSIDE = (nn.Module, ModuleType, FunctionType, type, str, bytes, int, float, torch.Generator)
#: Types of which it is known at once that no tensor is inside.
_ATOMS = {int, float, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_PLAIN = (Tensor, nn.Parameter)
#: The tensors that a sparse one consists of.
_SPARSE_PARTS = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), ("ccol_indices", "row_indices", "values")),
}


def tensors_in(value: object, depth: int = _DEEPEST) -> Iterator[Tensor]:
    """Yield the tensors in nested lists, dicts, dataclasses and plain objects, each once.

    It finds the tensors of a key-value cache or a Hugging Face ModelOutput, for instance. It doesn't look into modules.

    Args:
        value: a tensor, or any nesting of containers and objects.
        depth: how many levels of nesting to look into.
    """
    return _inside(value, depth, {})


def _inside(value: object, depth: int, seen: dict[int, object]) -> Iterator[Tensor]:
    if id(value) in seen:
        return
    if isinstance(value, Tensor):
        seen[id(value)] = value  # itself too: the id of what is gone is soon another's
        yield value
    elif depth >= 0 and type(value) not in _ATOMS and not isinstance(value, _NEVER_INSIDE):
        seen[id(value)] = value
        inner: Any = value
        if isinstance(value, Mapping):
            inner = value.values()
        elif not isinstance(value, (list, tuple, set, frozenset, deque)):
            slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
            names = (name for some in slots for name in ((some,) if isinstance(some, str) else some))
            inner = [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]
        for child in list(inner):
            if type(child) not in _ATOMS:
                yield from _inside(child, depth - 1, seen)


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the strided tensors that hold a tensor's data.

    The list has for a plain tensor the tensor itself, for a sparse tensor its indices and values, and for a wrapper
    such as DTensor the wrapped tensors. It is empty if torch gives no access to them.
    """
    if type(tensor) in _PLAIN and tensor.layout is torch.strided:  # nearly all, and quickly
        return [tensor]
    try:
        if is_traceable_wrapper_subclass(tensor):
            inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            # DTensor lists its device mesh as well.
            return [part for wrapped in inner if isinstance(wrapped, Tensor) for part in plain_tensors(wrapped)]
        if tensor.layout in _SPARSE_PARTS:
            with no_dispatch_modes():
                return [getattr(tensor, name)().detach() for name in _SPARSE_PARTS[tensor.layout]]
    except (RuntimeError, NotImplementedError, TypeError, AttributeError):
        return []
    return [tensor]


def stored_parts(value: object, depth: int = _DEEPEST) -> list[tuple[torch.UntypedStorage, Tensor]]:
    """Return a pair (storage, tensor) for each plain tensor in ``value``; wrapped and sparse tensors are unpacked.

    Args:
        value: a tensor, or tensors in nested lists, dicts, dataclasses and plain objects.
        depth: how many levels of nesting to look into.
    """
    parts = [part for tensor in tensors_in(value, depth) for part in plain_tensors(tensor)]
    return [(storage, part) for part in parts if (storage := storage_of(part)) is not None]


def storages_in(value: object) -> list[torch.UntypedStorage]:
    """Return the storages of all tensors in ``value``, which may be in nested lists, dicts and plain objects."""
    return [storage for storage, _ in stored_parts(value)]


def storages_of(*tensors: Tensor) -> WeakSet[torch.UntypedStorage]:
    """Return a set of weak references to the storages that hold the data of ``tensors``."""
    return WeakSet(storages_in(tensors))


def storage_of(value: object) -> torch.UntypedStorage | None:
    """Return the storage of ``value`` if it is a tensor.

    Returns: None for anything but a tensor, and for tensors without memory of their own: a DTensor, a sparse tensor,
        and the zeros that ``torch.func.jvp`` takes for the tangents of weights.
    """
    if type(value) not in _PLAIN and (not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value)):
        return None
    try:
        return None if value._is_zerotensor() else value.untyped_storage()  # type: ignore[attr-defined]
    except (RuntimeError, NotImplementedError, ValueError):  # the last: a lazy module's weight
        return None


class StorageLifetimes:
    """Follows storages by weak references, from ``begin`` until each is freed, and adds up their bytes.

    It holds no storage, and no storage holds it: when it is gone, nobody is told of a change any more.

    Args:
        changed: called when a storage's size changes, with the storage's number and its new bytes; and when the storage
            is freed, with its number and None. A storage's number is its place in the order of ``begin``, from 0.

    Attributes:
        bytes: the sum of the sizes of all followed storages that are alive.
        numbers: a dict with weak keys: for each of these storages its number.
    """

    def __init__(self, changed: Callable[[int, int | None], object] = lambda number, size: None):
        self._changed, self._sizes, self.bytes = changed, list[int](), 0
        # A storage has one Python object for as long as it lives, so a weak reference to that follows the storage
        # itself.
        self.numbers: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
        self._ends = dict[int, ref]()  # by number; each has a callback for when its storage is freed

    def begin(self, storage: torch.UntypedStorage) -> int:
        """Start to follow a storage that is not followed yet, and return its number."""
        number, size = len(self._sizes), storage.nbytes()
        self.numbers[storage] = number
        self._sizes.append(size)
        self.bytes += size
        self._ends[number] = ref(storage, lambda _: self._change(number, None))
        return number

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Look at a followed storage's size, and update ``bytes`` if it has changed."""
        number = self.numbers.get(storage)
        if number is not None and self._sizes[number] != storage.nbytes():
            self._change(number, storage.nbytes())

    def resizing(self, resize: Callable) -> Callable:
        """Wrap ``torch.UntypedStorage.resize_`` so that it also notes the new size.

        FSDP and pipeline stages call it to free or fill a storage, which no dispatch mode sees.
        """

        def run(storage, size):
            result = resize(storage, size)
            self.resized(storage)
            return result

        return run

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Stop following a storage, as if it had been freed."""
        if storage in self.numbers:
            self._change(self.numbers.pop(storage), None)

    def _change(self, number: int, size: int | None) -> None:
        self.bytes += (size or 0) - self._sizes[number]
        self._sizes[number] = size or 0
        if size is None:
            del self._ends[number]
        self._changed(number, size)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return a tensor's shape; for a strided nested tensor, which has no single shape, its number of elements."""
    try:
        return tuple(tensor.shape)
    except RuntimeError:
        return (tensor.untyped_storage().nbytes() // tensor.dtype.itemsize,)


@contextmanager
def replaced(owner: object, name: str, make: Callable[[Callable], object]) -> Iterator[None]:
    """Replace the attribute ``name`` of ``owner`` by ``make(original)`` while the block runs.

    Args:
        owner: a module, a class or an object. A static method stays static, and an inherited attribute is inherited
            again after the block.
        name: the name of the attribute, a function.
        make: gets the original function and returns the one to use in its place.
    """
    before = vars(owner).get(name)
    original: Any = before or getattr(owner, name)
    is_static = isinstance(original, staticmethod)
    new: Any = make(original.__func__ if is_static else original)
    setattr(owner, name, staticmethod(new) if is_static else new)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextmanager
def noting_states(note: Callable[[Tensor], object]) -> Iterator[None]:
    """While the block runs, call ``note`` with the state of each random-number generator that somebody reads.

    No operation of torch's dispatcher returns such a state, so this wraps torch's ``get_rng_state`` and
    ``recompute.generator_states``.
    """

    def make(get_state):
        def noting(*args, **kwargs):
            states = get_state(*args, **kwargs)
            for state in tensors_in(states):
                note(state)
            return states

        return noting

    with ExitStack() as stack:
        places = (torch, "get_rng_state"), (torch.random, "get_rng_state"), (recompute, "generator_states")
        for owner, name in places:
            stack.enter_context(replaced(owner, name, make))
        yield


def settled(count: Callable[[], int]) -> int:
    """Call ``count`` until its result has not changed for 0.1 s, and return that result; without gloo call it once.

    After a collective, gloo's threads free its tensor a moment later, so an early count can have one tensor too many.
    It never has one too few, so a count of zero is returned at once.
    """
    number = count()
    if number and dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        unchanged_since = time.monotonic()
        while time.monotonic() - unchanged_since < 0.1:
            time.sleep(0.005)
            if (now := count()) != number:
                number, unchanged_since = now, time.monotonic()
    return number
