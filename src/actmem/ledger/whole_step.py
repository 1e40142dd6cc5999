"""One training step: the live bytes after each operation, and the bill: a row for each storage alive at the peak.

A dispatch mode sees each operation's results, and follows each storage until it is freed. Not seen are memory that a
kernel allocates and frees inside itself, and the 8 bytes on the host in which torch keeps a Python number for backward
(the 2 of ``x * 2``). What was there before and belongs neither to the model nor to the optimizer or the batch, such as
DDP's buckets, counts from the first operation that reads it: a peak before that lacks it. A storage gets its name after
the step: only then is it known whether it became a gradient, or which operation saved it for backward.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from actmem.config import ConfigError, shown
from actmem.ledger.census import arguments_of
from actmem.ledger.comms import KIND_OF_NAME
from actmem.ledger.ledger_tables import SavedTensor, bill_text
from actmem.ledger.provenance import Provenance, ProvenanceTracker
from actmem.ledger.recorder import sums_of
from actmem.ledger.save_sites import OperationTracker, is_compiled
from actmem.ledger.storages import StorageLifetimes, replaced, shape_of, stored_parts, tensors_in

#: What a storage can be at the peak, in the order in which a bill lists it.
BILL_KINDS = (
    "weight", "buffer", "gradient", "main gradient", "optimizer state", "input", "output", "activation",
    "recomputed activation", "cast weight", "gathered weight", "constant", "generator state", "communication buffer",
    "made by forward",
    "made by backward", "made by the optimizer", "from before",
)  # fmt: skip


@dataclass
class StepBill:
    """The memory of one training step, as ``step`` and ``watch_step`` return it.

    Attributes:
        peak_bytes: the most bytes alive after any operation.
        peak_at: the index of the peak in ``curve``.
        peak: the bill: a row for each storage alive at the peak. Their bytes add up to ``peak_bytes``.
        curve: live bytes after each operation.
        phases: pairs of a phase's name (forward, backward, optimizer) and the index in ``curve`` at which it begins.
        lives: for each storage of the step its row, and its size over time: pairs of an index in ``curve`` and the
            bytes from there on. The last pair has 0 bytes if the storage was freed.
    """

    peak_bytes: int = 0
    peak_at: int = 0
    peak: list[SavedTensor] = field(default_factory=list)
    curve: list[int] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)
    lives: list[tuple[SavedTensor, list[tuple[int, int]]]] = field(default_factory=list)

    def by_kind(self) -> dict[str, int]:
        """Return the bytes of each kind at the peak, in the order of ``BILL_KINDS``."""
        return sums_of(self.peak, BILL_KINDS)

    @property
    def peak_phase(self) -> str:
        """Name of the phase in which the peak lies."""
        return next((name for name, start in reversed(self.phases) if start <= self.peak_at), "")

    __repr__ = bill_text


def step(
    model: nn.Module,
    batch: Any,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> StepBill:
    """Run one training step (forward, backward, and the optimizer's step if there is one) and measure its memory.

    Gradients are left in ``.grad``. The first step also makes the optimizer's states; for a later step's memory, call
    this twice.

    Args:
        model: the module to train.
        batch: the model's input: a tuple of positional arguments, a dict of keyword arguments, or any other value as
            the only argument.
        loss: computes a scalar from the model's output. None: the output's ``loss`` if it has one, else the sum of its
            first floating-point tensor.
        optimizer: steps after backward; None: the step has no optimizer.

    Returns: the bill of the step.
    Raises: ConfigError if the loss is not one number that needs a gradient, or if the optimizer needs a closure.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("optimizer", "must step without a closure; LBFGS runs forward and backward again in one")
    args, kwargs = arguments_of(batch)
    with watch_step(model, optimizer, batch) as bill:
        # The output isn't held any longer than the graph holds it.
        _scalar((loss or loss_of)(model(*args, **kwargs))).backward()
        if optimizer is not None:
            optimizer.step()
    return bill


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) and loss.numel() != 1 else shown(loss)
        raise ConfigError("loss", f"must be one number that needs a gradient, got {got}")
    return loss


def loss_of(output: Any) -> Tensor:
    """Return a model output's ``loss``, or if it has none, the sum of its first floating-point or complex tensor.

    Raises: ConfigError if the output has no such tensor either.
    """
    carried = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(carried, Tensor):
        return carried
    for tensor in tensors_in(output):
        if tensor.is_complex():
            return torch.view_as_real(tensor).sum()
        if tensor.is_floating_point():
            return tensor.sum()
    raise ConfigError("loss", f"there is none, and the output, a {type(output).__name__}, has no floating-point tensor")


@contextmanager
def watch_step(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, batch: Any = None
) -> Iterator[StepBill]:
    """Measure a training step that the block runs itself, such as a pipeline's, or one with several microbatches.

    Args:
        model: the module that the block trains.
        optimizer: the optimizer that the block runs, so that the bill can name its states and the phase of its
            ``step``; None: they get no name.
        batch: the tensors, in lists, dicts or objects, that the bill names "input"; None: none.

    Yields: the bill, which is complete when the block ends.
    """
    bill, history = StepBill(), StepHistory()
    tracker = OperationTracker(model, follows_functions=not is_compiled(model))
    provenance = ProvenanceTracker(tracker, history.begin, history.after)
    history.note_what_exists(model, optimizer, batch)
    with ExitStack() as stack:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_leaf and not is_lazy(parameter):
                # A hook that sees the gradient earlier would make autograd copy it.
                hook = parameter.register_post_accumulate_grad_hook(
                    lambda p, name=name: history.label_storages(p.grad, "gradient", name, "gradient")
                )
                stack.callback(hook.remove)
        if optimizer is not None:
            stack.enter_context(replaced(optimizer, "step", history.during("optimizer")))
        for function in ("backward", "grad"):
            stack.enter_context(replaced(torch.autograd, function, history.during("backward")))
        stack.enter_context(replaced(torch.UntypedStorage, "resize_", history.lifetimes.resizing))
        stack.enter_context(provenance.watching())
        history.enter("forward")
        history.count()
        yield bill
    history.note_what_exists(model, optimizer, None)
    history.classify(provenance)
    bill.curve = history.curve
    bill.phases = [(name, start) for name, start in history.phases if start < len(history.curve)]
    bill.peak_bytes = max(history.curve)
    bill.peak_at = history.curve.index(bill.peak_bytes)
    bill.lives = [(life.bill_line(), list(life.sizes)) for life in history.lives]
    at_peak = [replace(row, bytes=size) for row, sizes in bill.lives if (size := size_at(sizes, bill.peak_at))]
    bill.peak = sorted(at_peak, key=lambda row: (BILL_KINDS.index(row.kind), -row.bytes))


def size_at(sizes: list[tuple[int, int]], moment: int) -> int:
    """Return a storage's bytes at one moment, from its sizes over time.

    Args:
        sizes: pairs of an index in the step's ``curve`` and the bytes from there on, in order.
        moment: an index in the step's ``curve``.
    """
    return next((size for start, size in reversed(sizes) if start <= moment), 0)


@dataclass
class StorageLife:
    """What is known of one storage of a step: where it came from, its size over time, and its name on the bill.

    Attributes:
        origin: the Provenance of the storage: which operation made it, in which module.
        phase: the phase in which the storage was first seen: "before", "forward", "backward" or "optimizer".
        sizes: pairs of an index in the step's ``curve`` and the storage's bytes from then on; the last has 0 bytes if
            the storage was freed.
        label: kind, name and operation, if the storage belongs to the model, the optimizer or the batch; else None.
        kind: the storage's kind, from ``ProvenanceTracker.kind_of``, if it is a copy of weights or a constant; else "".
        is_output: whether an outermost module returned the storage.
    """

    origin: Provenance
    phase: str
    sizes: list[tuple[int, int]]
    label: tuple[str, str, str] | None = None  # kind, name, operation
    kind: str = ""
    is_output: bool = False

    def bill_line(self) -> SavedTensor:
        """Return the storage's row for the step's bill; its ``bytes`` are the storage's size when it was first seen."""
        kind, module, op, argument = _kind_and_maker(self)
        return SavedTensor(module, op, argument, self.origin.shape, self.origin.dtype, self.sizes[0][1], "", kind)


class StepHistory:
    """Collects a step's curve of live bytes and a StorageLife for each storage, while the step runs.

    ``curve`` gets an entry after each operation. A storage made or freed in between counts as made or freed at the next
    entry.
    """

    def __init__(self) -> None:
        self.lives: list[StorageLife] = []  # by the storage's number
        self.lifetimes = StorageLifetimes(self._note_size)
        self.curve: list[int] = []
        self.phase = "before"
        self.phases: list[tuple[str, int]] = []

    def enter(self, phase: str) -> None:
        """Begin a phase, "forward", "backward" or "optimizer", unless the step is already in it."""
        if phase != self.phase:
            self.phase = phase
            self.phases.append((phase, len(self.curve)))

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set the phase, such as "backward", while the block runs; as a decorator, during each call of the function."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def count(self) -> None:
        """Append the bytes that are alive now to ``curve``."""
        self.curve.append(self.lifetimes.bytes)

    def after(self, storages: list[torch.UntypedStorage]) -> None:
        """Note an operation's end: look at the sizes of its storages, and append the live bytes to ``curve``."""
        for storage in storages:
            self.lifetimes.resized(storage)
        self.count()

    def begin(self, storage: torch.UntypedStorage, origin: Provenance) -> None:
        """Start to follow a storage, unless it is followed already.

        Args:
            storage: the storage.
            origin: the Provenance of the storage.
        """
        if storage not in self.lifetimes.numbers:
            self.lives.append(StorageLife(origin, self.phase, [(len(self.curve), storage.nbytes())]))
            self.lifetimes.begin(storage)

    def _note_size(self, number: int, size: int | None) -> None:
        self.lives[number].sizes.append((len(self.curve), size or 0))

    def label_storages(self, value: object, kind: str, name: str, op: str) -> None:
        """Label all storages in ``value`` that have no label yet, and start to follow those that are not followed.

        Args:
            value: tensors, in lists, dicts or objects.
            kind: one of BILL_KINDS, such as "gradient".
            name: the text for the bill's column "module", such as the parameter's name.
            op: the text for the bill's column "operation".
        """
        for storage, part in stored_parts(value):
            self.begin(storage, Provenance(False, op, module=name, shape=shape_of(part), dtype=part.dtype))
            life = self.lives[self.lifetimes.numbers[storage]]
            life.label = life.label or (kind, name, op)

    def note_what_exists(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any) -> None:
        """Label the storages of weights, gradients, buffers, optimizer states and inputs that exist now.

        Args:
            model: the module that is trained.
            optimizer: its optimizer; None: there are no optimizer states.
            batch: tensors, in lists, dicts or objects, to label "input"; None: none.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for name, parameter in model.named_parameters():
            self.label_storages(parameter, "weight", name, "parameter")
            self.label_storages(parameter.grad, "gradient", name, "gradient")
            self.label_storages(getattr(parameter, "main_grad", None), "main gradient", name, "main gradient")
        for name, buffer in model.named_buffers():
            self.label_storages(buffer, "buffer", name, "buffer")
        groups, states = (optimizer.param_groups, optimizer.state) if optimizer is not None else ((), {})
        for number, parameter in enumerate(p for group in groups for p in group["params"]):
            name = names.get(id(parameter), f"parameter {number} of the optimizer")
            self.label_storages(parameter, "optimizer state", name, "copy of the weight")
            for key, state in states.get(parameter, {}).items():
                self.label_storages(state, "optimizer state", name, str(key))
        self.label_storages(batch, "input", "", "input")

    def classify(self, provenance: ProvenanceTracker) -> None:
        """Set ``kind`` and ``is_output`` in the StorageLife of each storage that is alive now.

        Call it while the storages live: once one is freed, its kind can't be found.

        Args:
            provenance: knows where each storage comes from. Only copies and constants get a kind from it; for all other
                storages ``kind`` stays "".
        """
        for storage, number in list(self.lifetimes.numbers.items()):
            life = self.lives[number]
            origin = life.origin
            life.is_output = storage in provenance.tracker.outputs
            if storage in provenance.origins and (
                origin.gathered or origin.made and (origin.copied_from or origin.constant)
            ):
                life.kind = provenance.kind_of(storage, origin.dtype, origin.operation)


def _kind_and_maker(life: StorageLife) -> tuple[str, str, str, str]:
    """Return kind, module, operation and argument of a line of the bill; the last is "" if autograd did not save it."""
    origin = life.origin
    if life.label is not None:
        return *life.label, ""
    if life.kind in ("cast weight", "gathered weight"):
        return life.kind, origin.module, origin.operation, ""
    if origin.operation == "generator state":
        return "generator state", origin.module, origin.operation, ""
    if origin.saved:
        first = next(iter(origin.saved.values()))
        kind = "recomputed activation" if life.phase == "backward" else life.kind or "activation"
        return kind, first.module, first.op, first.argument
    if not origin.made:
        return "from before", origin.module, origin.operation, ""
    if life.is_output:
        return "output", origin.module, origin.operation, ""
    if origin.operation in KIND_OF_NAME:
        return "communication buffer", origin.module, KIND_OF_NAME[origin.operation], ""
    if life.phase == "backward" and origin.inside:
        return "recomputed activation", origin.module, origin.operation, ""
    makers = {"backward": "made by backward", "optimizer": "made by the optimizer"}
    return makers.get(life.phase, "made by forward"), origin.module, origin.operation, ""
