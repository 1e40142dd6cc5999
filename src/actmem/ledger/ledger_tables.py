"""The rows of a ledger (what a forward pass saves) and of a bill (what is alive at a step's peak), and their text."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from actmem.rows import size_text

UNSAVED = "alive but not saved by autograd"
#: What a stored tensor can be, in the order in which tables list these kinds.
STORAGE_KINDS = (
    "activation", "input", "cast weight", "constant", "generator state", UNSAVED, "weight", "gathered weight",
)  # fmt: skip


@dataclass(frozen=True)
class SavedTensor:
    """One tensor, its bytes, and which module and operation saved it first.

    It is a row of a Ledger (what is saved for backward) or of a StepBill (what is alive at a training step's peak).

    Attributes:
        module: name of the innermost module that was running; "" for the root.
        op: the name of the torch function, or of the autograd Function, that saved it.
        argument: which input of ``op`` the tensor is ("0", "1", …, or a keyword); "" for a tensor that ``op`` made
            itself.
        shape: the tensor's shape; of a strided nested tensor the number of its elements.
        dtype: a torch.dtype, or its name in a row of a file.
        bytes: this tensor's share of its storage; the shares of one storage add up to its size.
        line: file and line of the call that saved it, such as "model.py:12".
        kind: one of ``STORAGE_KINDS``, such as "activation"; in a StepBill one of ``whole_step.BILL_KINDS``.
        held_by: what keeps the tensor alive if autograd doesn't, such as a cache; "" if autograd does.
        made_by: the operation of torch's dispatcher that made the tensor; "" if it existed before.
        term: the name that one of this library's layers gave the tensor (``drop.NamedForward``); "" in other models.
        device: the type of the device that holds the tensor: "cpu", "cuda", ….
    """

    module: str
    op: str
    argument: str
    shape: tuple[int, ...]
    dtype: Any
    bytes: int
    line: str
    kind: str = "activation"
    held_by: str = ""
    made_by: str = ""
    term: str = ""
    device: str = "cpu"

    @property
    def name(self) -> str:
        """Module, operation and argument, as one string."""
        return f"{self.module or 'root'}: {self.op} {self.argument}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dict that can be written as JSON; ``rows_of_file`` makes a SavedTensor of it again."""
        return {**vars(self), "shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}


def rows_of_file(rows: Iterable[dict[str, Any]]) -> list[SavedTensor]:
    """Return a SavedTensor for each dict from ``SavedTensor.as_dict``, as read from a JSON file."""
    return [SavedTensor(**{**row, "shape": tuple(row["shape"])}) for row in rows]


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def fold(rows: Iterable[SavedTensor]) -> list[SavedTensor]:
    """Return the rows sorted by bytes, with those joined that differ only in numbers in their module's name.

    Such a number is the layer's, for instance. A joined row has the sum of the bytes, and a range in its module's name:
    ``layers.0-3.norm ×4`` stands for four rows. The largest row comes first.
    """
    groups: dict[tuple, list[SavedTensor]] = {}
    for row in rows:
        pattern = _NUMBER.sub("*", row.module)
        key = (pattern, row.op, row.argument, row.shape, row.dtype, row.bytes, row.kind, row.held_by, row.device)
        groups.setdefault(key, []).append(row)
    folded = [
        replace(
            group[0],
            module=folded_name([row.module or "root" for row in group]) + (f" ×{len(group)}" if len(group) > 1 else ""),
            bytes=sum(row.bytes for row in group),
        )
        for group in groups.values()
    ]
    return sorted(folded, key=lambda row: -row.bytes)


def folded_name(names: list[str]) -> str:
    """Return one name for several names that differ only in their numbers.

    Args:
        names: such as ``["layers.0.norm", "layers.1.norm"]``.

    Returns: a name with ranges, such as ``layers.0-3.norm`` or ``layers.0,2.norm``.
    """
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in names))
    ranges = iter([_range(sorted(set(column))) for column in columns])
    return _NUMBER.sub(lambda _: next(ranges), names[0])


def _range(numbers: list[int]) -> str:
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    shown = ",".join(map(str, numbers[:4]))
    return shown if len(numbers) <= 4 else f"{shown},…{numbers[-1]}"


#: How many rows a ledger shows when it is printed.
_SHOWN = 30


def lines_of(rows: Iterable[SavedTensor]) -> list[tuple[str, ...]]:
    """Return for each row a tuple of strings, the cells of its line in a table whose columns are ``HEADINGS``."""
    return [
        (
            f"{row.bytes:,}",
            row.module,
            f"{row.op} {row.argument}".rstrip(),
            "×".join(map(str, row.shape)) or "scalar",
            str(row.dtype).removeprefix("torch."),
            row.kind + (f", held by {row.held_by}" if row.held_by else ""),
        )
        for row in rows
    ]


HEADINGS = ("bytes", "module", "operation", "shape", "dtype", "kind")


def aligned(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table as text with aligned columns, the first one flush right.

    Args:
        headings: one text for each column.
        lines: for each line the texts of its cells.
    """
    columns = list(zip(headings, *lines)) if lines else [(heading,) for heading in headings]
    widths = [max(map(len, column)) for column in columns]
    text = [
        "  ".join(
            cell.rjust(width) if i == 0 else cell.ljust(width) for i, (cell, width) in enumerate(zip(line, widths))
        )
        for line in (headings, *lines)
    ]
    return "\n".join(line.rstrip() for line in text)


def ledger_text(ledger: Any) -> str:
    """Return a ``Ledger`` as text: its total, the bytes of each kind, and its largest rows."""
    kinds = ", ".join(f"{kind} {size:,}" for kind, size in ledger.by_kind().items())
    host = f", and {ledger.host_bytes:,} B in the host's memory" if ledger.host_bytes else ""
    head = f"{ledger.total_bytes:,} B ({size_text(ledger.total_bytes)}) stay for backward{host}: {kinds or 'nothing'}"
    return "\n".join([head, *([rows_text(ledger.tensors)] if ledger.tensors else [])])


def rows_text(rows: Iterable[SavedTensor], most: int = _SHOWN) -> str:
    """Return a table of the ``most`` largest rows as text, after joining alike rows of different layers (``fold``)."""
    folded = fold(rows)
    text = aligned(HEADINGS, lines_of(folded[:most]))
    return text + (f"\n… and {len(folded) - most} smaller rows" if len(folded) > most else "")


def bill_text(bill: Any) -> str:
    """Return a ``StepBill`` as text: the bytes alive at the peak, the same by kind, and the largest rows."""
    head = f"peak {bill.peak_bytes:,} B ({size_text(bill.peak_bytes)}), in {bill.peak_phase}"
    kinds = [(f"{size:,}", kind) for kind, size in bill.by_kind().items()]
    return "\n\n".join([head, aligned(("bytes", "kind"), kinds), rows_text(bill.peak)])
