"""A ledger's and a bill's rows, and how they look as text."""

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
    """One stored tensor: what it is and who saved it first.

    Attributes:
        module: name of the innermost module that was running; "" for the root.
        op: the torch function, or the autograd Function, that saved it.
        argument: which input of ``op`` the tensor is ("0", "1", …, or a keyword); "" for a tensor that ``op`` made
            itself.
        dtype: a torch.dtype, or its name in a row of a file.
        bytes: this tensor's share of its storage; the shares of one storage add up to its size.
        line: file and line of the call.
        kind: one of ``STORAGE_KINDS``.
        held_by: what keeps it, if autograd doesn't and the holder was found.
        made_by: the operation below autograd that made it; "" if the tensor existed before.
        term: the name that one of this library's layers gave it (``drop.NamedForward``); "" in other models.
        device: the type of the device that holds it.
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
        """Module, operation and argument, as one text."""
        return f"{self.module or 'root'}: {self.op} {self.argument}".rstrip()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name as plain values that JSON can hold; ``rows_of_file`` reads them."""
        return {**vars(self), "shape": list(self.shape), "dtype": str(self.dtype).removeprefix("torch.")}


def rows_of_file(rows: Iterable[dict[str, Any]]) -> list[SavedTensor]:
    """Make the rows again from the dicts that ``SavedTensor.as_dict`` made."""
    return [SavedTensor(**{**row, "shape": tuple(row["shape"])}) for row in rows]


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def fold(rows: Iterable[SavedTensor]) -> list[SavedTensor]:
    """Join rows that differ only in the numbers of their module's name, and sort by bytes, the largest first.

    A joined row has the bytes of all its rows. Its module has ranges for the numbers, and says how many rows it stands
    for: ``layers.0-3.norm ×4``.
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
    """Join names that differ only in their numbers to one name: ``layers.0-3.norm``, or ``layers.0,2.norm``."""
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
    """Return the cells of a table of folded rows, under ``HEADINGS``: one tuple for each row."""
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
    """Return a table as text, with its columns aligned; the first is flush right."""
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
    """Return a ledger as text: its total, the bytes of each kind, and its largest rows."""
    kinds = ", ".join(f"{kind} {size:,}" for kind, size in ledger.by_kind().items())
    host = f", and {ledger.host_bytes:,} B in the host's memory" if ledger.host_bytes else ""
    head = f"{ledger.total_bytes:,} B ({size_text(ledger.total_bytes)}) stay for backward{host}: {kinds or 'nothing'}"
    return "\n".join([head, *([rows_text(ledger.tensors)] if ledger.tensors else [])])


def rows_text(rows: Iterable[SavedTensor], most: int = _SHOWN) -> str:
    """Return a table of the ``most`` largest rows, folded, as text."""
    folded = fold(rows)
    text = aligned(HEADINGS, lines_of(folded[:most]))
    return text + (f"\n… and {len(folded) - most} smaller rows" if len(folded) > most else "")


def bill_text(bill: Any) -> str:
    """Return a step's bill as text: the peak, the bytes of each kind, and its largest rows."""
    head = f"peak {bill.peak_bytes:,} B ({size_text(bill.peak_bytes)}), in {bill.peak_phase}"
    kinds = [(f"{size:,}", kind) for kind, size in bill.by_kind().items()]
    return "\n\n".join([head, aligned(("bytes", "kind"), kinds), rows_text(bill.peak)])
