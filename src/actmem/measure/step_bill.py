"""The bill of a training step at its highest point: one line for each storage alive there, by name.

A storage's name is found out when the step is over: by then it is known whose gradient it became,
or what autograd saved it for.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actmem.measure.comms import KIND_OF_NAME
from actmem.measure.ledger import SavedTensor
from actmem.measure.lives import Life, Lives
from actmem.measure.savers import OperationTracker

#: What a storage can be at the peak, in the order in which a bill lists it.
BILL_KINDS = (
    "weight", "buffer", "gradient", "main gradient", "optimizer state", "input", "output", "activation", "recomputed activation",
    "cast weight", "gathered weight", "constant", "generator state", "communication buffer", "made by forward",
    "made by backward", "made by the optimizer", "from before",
)  # fmt: skip


@dataclass
class StepBill:
    """What ``step`` saw.  peak_bytes: the most bytes alive after any operation; peak: its bill, whose bytes add up to it.

    curve: live bytes after each operation.  phases: index in ``curve`` at which forward, backward and
    the optimizer begin, in order.
    """

    peak_bytes: int = 0
    peak_at: int = 0
    peak: list[SavedTensor] = field(default_factory=list)
    curve: list[int] = field(default_factory=list)
    phases: list[tuple[str, int]] = field(default_factory=list)

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind at the peak, in the order of ``BILL_KINDS``."""
        sums = {kind: sum(row.bytes for row in self.peak if row.kind == kind) for kind in BILL_KINDS}
        return {kind: size for kind, size in sums.items() if size}

    @property
    def peak_phase(self) -> str:
        """The phase in which the peak lies."""
        return next((name for name, start in reversed(self.phases) if start <= self.peak_at), "")

    def __repr__(self) -> str:
        from actmem.measure.ledger_tables import bill_text

        return bill_text(self)

    def _repr_html_(self) -> str:
        from actmem.measure.ledger_tables import bill_html

        return bill_html(self)


def bill_lines(lives: Lives, tracker: OperationTracker, moment: int) -> list[SavedTensor]:
    """Every storage alive at that moment, by kind, the largest first."""
    outputs = {id(storage) for storage in tracker.outputs}
    lines = []
    for life in lives.lives:
        if size := life.bytes_at(moment):
            storage, origin = life.reference(), life.origin
            kind, module, op, argument = _named(life, storage is not None and id(storage) in outputs)
            lines.append(SavedTensor(module, op, argument, origin.shape, origin.dtype, size, "", kind))
    return sorted(lines, key=lambda row: (BILL_KINDS.index(row.kind), -row.bytes))


def _named(life: Life, is_output: bool) -> tuple[str, str, str, str]:
    """Kind, module, operation and argument of one line of the bill."""
    origin = life.origin
    if life.label is not None:
        kind, name, op = life.label
        return kind, name, op, ""
    if life.kind in ("cast weight", "gathered weight"):
        return life.kind, origin.module, origin.operation, ""
    if origin.operation == "generator state":
        return "generator state", origin.module, origin.operation, ""
    if life.saved is not None:
        kind = "recomputed activation" if life.phase == "backward" else life.kind or "activation"
        return kind, *life.saved
    if not origin.made:
        return "from before", origin.module, origin.operation, ""
    if is_output:
        return "output", origin.module, origin.operation, ""
    if origin.operation in KIND_OF_NAME:
        return "communication buffer", origin.module, KIND_OF_NAME[origin.operation], ""
    if life.phase == "backward" and origin.inside:
        return "recomputed activation", origin.module, origin.operation, ""
    makers = {"backward": "made by backward", "optimizer": "made by the optimizer"}
    return makers.get(life.phase, "made by forward"), origin.module, origin.operation, ""
