"""Count what a learner's function saves for backward, and what its forward and backward pass allocate.

Autograd's saved-tensor hooks see what is saved; storages that stay alive in another way are counted too.
``actmem.record`` tells more about each tensor, but it patches torch for all threads.  Virtual ranks are threads that
count at the same time, so everything here works within one thread.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from actmem.ledger.storages import StorageLifetimes, plain_tensors, shape_of, storage_of, storages_of
from actmem.torch_private import DispatchMode, no_dispatch_modes, tree_leaves
from actmem_course.judge.compare import dtype_name
from actmem_course.judge.verdict import Fault, Wrong
from actmem_course.judge.virtual import line_in

#: How many needless tensors a sentence names at most.
_MOST_NAMED = 4


@dataclass(frozen=True)
class SavedStorage:
    """One storage that autograd saves.

    Attributes:
        bytes: the storage's size.
        dtype: the dtype of the saved tensor.
        shape: the shape of the saved tensor.
        line: file and line of the learner's code that saved the tensor: "lab2.py:30"; "" if other code did.
        given: whether the storage is that of the function's input.
        copied: whether the tensor is a copy of the input: another storage with the same values.
    """

    bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    line: str
    given: bool = False
    copied: bool = False

    @property
    def is_state(self) -> bool:
        """Whether the tensor looks like the state of a random generator (of a GPU or the CPU), by dtype and length."""
        return self.dtype is torch.uint8 and self.shape in ((16,), (len(torch.get_rng_state()),))

    @property
    def text(self) -> str:
        """A text that describes the tensor and the line that saved it: "float32 [4, 3] of 48 B at lab2.py:30"."""
        place = f" at {self.line}" if self.line else ""
        return tensor_text(self.dtype, self.shape, self.bytes) + place


@dataclass(frozen=True)
class SavedBytes:
    """What a function saves for backward.

    Attributes:
        saved: the storages that autograd's hooks saw.
        hidden_bytes: bytes of other storages that stay alive until backward, such as attributes of ctx.
    """

    saved: list[SavedStorage]
    hidden_bytes: int

    @property
    def bytes(self) -> int:
        """The bytes of the storages in ``saved`` together."""
        return sum(tensor.bytes for tensor in self.saved)

    def without_copies(self, repair: str) -> SavedBytes:
        """Check that the function saves no copy of its input.  If the caller holds the input, it would be there twice.

        Args:
            repair: what the learner should do if the function also saves tensors other than x and copies of x.

        Returns: this object.

        Raises: Wrong if a copy is saved.
        """
        only_copies = all(saved.copied or saved.given or saved.is_state for saved in self.saved)
        for saved in self.saved:
            if saved.copied:
                there_twice = "others may hold x, so with the copy it is there twice"
                save_x = "save x itself" if only_copies else repair or "save x itself"
                raise Wrong(f"it saves a copy of x at {saved.line}", save_x, there_twice)
        return self

    def as_much(self) -> tuple:
        """Return a key to compare two runs: equal if both save storages of the same sizes and dtypes."""
        return sorted((tensor.bytes, str(tensor.dtype)) for tensor in self.saved), self.hidden_bytes

    def largest(self) -> str:
        """Return a text that describes the two largest tensors that are saved, with the lines that save them."""
        return ", ".join(counted(tensor.text for tensor in sorted(self.saved, key=lambda tensor: -tensor.bytes))[:2])


def tensor_text(dtype: torch.dtype, shape: Sequence[int], size: int) -> str:
    """Return a text that describes a tensor: "float32 [4, 3] of 48 B".

    Args:
        dtype: the tensor's dtype.
        shape: the tensor's shape.
        size: the tensor's bytes.
    """
    return f"{dtype_name(dtype)} {list(shape)} of {size:,} B"


def counted(texts: Iterable[str]) -> list[str]:
    """Return the different texts, each once; a text that occurs twice gets "2 × " before it."""
    return [text if number == 1 else f"{number} × {text}" for text, number in Counter(texts).items()]


class SavingRecorder:
    """Records, while its ``with`` block runs in this thread, what autograd saves and which storages operations make.

    Args:
        weights: tensors whose storages don't count.
        file: the learner's file; its lines are named in messages.

    Attributes:
        input: the function's input and a reference to its storage, by which copies of it are recognized.
    """

    def __init__(self, weights: Sequence[Tensor] = (), file: str = ""):
        self._own, self._file = storages_of(*weights), file
        self.input: tuple[Tensor, weakref.ref] | None = None
        # Both forget a storage when it is freed.
        self._saved: weakref.WeakKeyDictionary[torch.UntypedStorage, SavedStorage] = weakref.WeakKeyDictionary()
        self._made = storages_of()
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._results = _Results(self._note)

    def __enter__(self) -> SavingRecorder:
        self._results.__enter__()
        self._hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._hooks.__exit__(*error)
        self._results.__exit__(*error)

    def alive(self) -> SavedBytes:
        """Return the recorded storages that are still alive, without states of random generators.

        If the caller holds nothing but the result's graph, that is what the function saves for backward.
        """
        hidden = sum(storage.nbytes() for storage in self._made if storage not in self._saved)
        return SavedBytes([saved for saved in self._saved.values() if not saved.is_state], hidden)

    def _pack(self, tensor: Tensor) -> Tensor:
        for part in plain_tensors(tensor):
            storage = storage_of(part)
            if storage is not None and storage not in self._own and storage not in self._saved:
                line, of_input = line_in(self._file), self._of_input(part, storage)
                self._saved[storage] = SavedStorage(
                    storage.nbytes(), part.dtype, tuple(shape_of(part)), line, *of_input
                )
        # An output that is saved as it is would hold the graph, which holds the output: neither would ever be freed.
        return tensor.detach() if tensor.requires_grad else tensor

    def _of_input(self, part: Tensor, storage: object) -> tuple[bool, bool]:
        """Whether a storage is the input's, and whether it is another one with the input's values."""
        if self.input is None or self.input[1]() is storage or part.dtype is not self.input[0].dtype:
            return self.input is not None and self.input[1]() is storage, False
        with no_dispatch_modes():
            return False, torch.equal(part.detach().flatten(), self.input[0].detach().flatten())

    def _note(self, tensor: Tensor) -> None:
        for part in plain_tensors(tensor):
            storage = storage_of(part)
            if storage is not None and storage not in self._own:
                self._made.add(storage)


class _Results(DispatchMode):
    """Calls ``note`` with every tensor that an operation returns."""

    def __init__(self, note: Callable[[Tensor], None]):
        super().__init__()
        self._note = note

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it turns into plain tensors first
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._note(tensor)
        return result


class Largest(_Results):
    """Records, while its ``with`` block runs in this thread, the largest tensor and the peak that operations allocate.

    Args:
        given: tensors that exist before the block and don't count.
        file: the path of the learner's file; its lines are named in messages.

    Attributes:
        elements: how many elements the largest tensor has.
        what: a text that describes the largest tensor: "float32 [4, 3] of 48 B made at lab2.py:30".
        peak: the most bytes that are alive after any operation.
    """

    def __init__(self, *given: Tensor, file: str = "") -> None:
        super().__init__(self._see)
        self._given, self._file = storages_of(*given), file
        self._alive = StorageLifetimes()
        self._texts: weakref.WeakKeyDictionary[torch.UntypedStorage, str] = weakref.WeakKeyDictionary()
        self._at_peak: list[tuple[int, str]] = []
        self.elements, self.what, self.peak = 0, "", 0

    def _see(self, tensor: Tensor) -> None:
        storage = storage_of(tensor)
        if storage is None or storage in self._given:
            return
        if storage not in self._texts:
            size, line = storage.nbytes(), line_in(self._file)
            text = tensor_text(tensor.dtype, tensor.shape, size) + (f" made at {line}" if line else "")
            self._texts[storage] = text
            self._alive.begin(storage)
            if size // tensor.dtype.itemsize > self.elements:
                self.elements, self.what = size // tensor.dtype.itemsize, text
        self._alive.resized(storage)
        if self._alive.bytes > self.peak:  # this can count a storage that has been made smaller since: count again
            living = [(storage.nbytes(), text) for storage, text in self._texts.items()]
            if (peak := sum(size for size, _ in living)) > self.peak:
                self.peak, self._at_peak = peak, living

    def most(self) -> str:
        """Return a text that describes the two largest tensors that are alive at the peak."""
        return ", ".join(counted(text for _, text in sorted(self._at_peak, reverse=True))[:2])


def saved_bytes(
    function: Callable[..., Tensor],
    x: Tensor,
    weights: Sequence[Tensor] = (),
    others: Sequence[Tensor] = (),
    watching: AbstractContextManager = nullcontext(),  # noqa: B008
    file: str = "",
) -> SavedBytes:
    """Run ``function(x, *weights)``, and count what it saves for backward.

    Args:
        function: the function under test.
        x: the function's input.
        weights: the function's weights, which don't count.
        others: further tensors that the function uses and that don't count.
        watching: a context in which the function runs.
        file: the path of the learner's file; its lines are named in messages.

    Returns: the storages that are alive while only the result's graph is held.

    Raises: Wrong if the result is None or has no graph.
    """
    weights = [w if isinstance(w, nn.Parameter) else nn.Parameter(w.detach()) for w in weights]
    leaf = x.detach().clone().requires_grad_()
    with watching, SavingRecorder([*weights, *others], file) as recorder:
        given = leaf * 1
        recorder.input = x, weakref.ref(storage_of(given))
        y = function(given, *weights)
        del given
        if hasattr(y, "trigger_wait"):  # a functional collective holds its tensors until someone waits for it
            y = y.trigger_wait()
        if not isinstance(y, Tensor):
            raise Wrong("the result is None", "is a return missing?")
        if y.grad_fn is None:
            raise Wrong("the result has no graph, so nothing before it gets a gradient")
        graph = y.grad_fn
        del y
        alive = recorder.alive()
        by_gloo = dist.is_initialized() and dist.get_backend() == "gloo"
        deadline = time.monotonic() + 2  # gloo's own threads release a tensor a moment after its collective ends
        while alive.hidden_bytes and by_gloo and time.monotonic() < deadline:
            time.sleep(0.02)
            alive = recorder.alive()
        del graph
    return alive


def too_much(found: SavedBytes, at_most: int, what: str, size: int) -> Fault | None:
    """Check that a function saves no more bytes than allowed, and no bytes that autograd's hooks can't see.

    Args:
        found: what the function saves on one rank.
        at_most: the most bytes that it may save.
        what: the tensors that have these bytes, for the message: "x and 1/rms".
        size: how many ranks there are.

    Returns: a fault that names the bytes that are too many; None if there are none.
    """
    # A DTensor's graph holds its device mesh, which holds the ranks' numbers, 8 bytes each.
    if found.hidden_bytes > 8 * size:
        fits = found.bytes + found.hidden_bytes <= at_most
        enough = f"{at_most:,} B{f' of {what}' if what else ''} are enough" if at_most else "backward needs none of it"
        return Fault(
            f"it holds {found.hidden_bytes:,} B where no hook can see them",
            "what backward reads goes to ctx.save_for_backward, the rest can go" if fits else f"drop it, {enough}",
            "a tensor is an attribute of ctx, or in a closure",
        )
    if found.bytes > at_most:
        enough = f"where {at_most:,} B are enough ({what})" if at_most else "and needs to save nothing"
        symptom = f"it saves {found.bytes:,} B for backward {enough}"
        return Fault(symptom, cause=f"the largest: {found.largest()}")
    return None


def needless(found: SavedBytes, right: SavedBytes, element_size: int, spare: int) -> Fault | None:
    """Find the tensors that a learner's function saves and our solution doesn't.

    Args:
        found: what the learner's function saves.
        right: what our solution saves.
        element_size: bytes of an element of the function's input; a tensor with larger elements is called a wider copy.
        spare: tensors of at most this many bytes are ignored.

    Returns: a fault whose cause names these tensors (its symptom is ""); None if there are none, or if our solution
        saves nothing.
    """
    left, words, widened = Counter((saved.dtype, saved.bytes) for saved in right.saved), [], False
    for saved in sorted(found.saved, key=lambda saved: (-saved.given, -saved.bytes)):
        if left[saved.dtype, saved.bytes]:
            left[saved.dtype, saved.bytes] -= 1
        elif saved.bytes > spare:
            wider = saved.dtype.itemsize > element_size
            widened |= wider
            words.append(f"{'a wider copy, ' if wider else ''}{saved.text}")
    words = counted(words)
    if not words or not right.saved:
        return None
    more = f"; and {len(words) - _MOST_NAMED} more" if len(words) > _MOST_NAMED else ""
    repair = "widen again in backward" if widened else "recompute it in backward"
    return Fault("", repair, f"not needed: {'; '.join(words[:_MOST_NAMED])}{more}")
