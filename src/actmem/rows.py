"""Rows: the common form of predictions and measurements.

A formula yields rows, a ledger yields rows, and ``compare`` matches them by term.  Tables, bars
and labs all draw rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from actmem.config import ConfigError
from actmem.recipes import BLOCK, BLOCK_BYTES, PAPER_LAYER, LayerTerms, Mode

#: The 15 tensors that one layer keeps, in the order of the forward pass (2205.05198 section 4.1).
LAYER_TERMS = (PAPER_LAYER.input, *(recipe.term for recipe in PAPER_LAYER.recipes))


@dataclass(frozen=True)
class Row:
    """Bytes of one stored tensor, or of one named group of them, on one rank.

    term: the name, the same in predictions and measurements.
    bytes: a whole number.
    split_by: how many ranks share the tensor; 1 if every rank keeps all of it.
    source: the equation, or the module and operation that saved it.
    extra: the reason why the paper leaves this term out; empty for the paper's own terms.
    """

    term: str
    bytes: int
    split_by: int = 1
    source: str = ""
    extra: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.bytes, bool) or not isinstance(self.bytes, int):
            raise ConfigError("bytes", f"row {self.term!r} must hold a whole number, got {self.bytes!r}")


def total(rows: Iterable[Row]) -> int:
    """Bytes of all rows together."""
    return sum(row.bytes for row in rows)


def paper_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows that the paper counts."""
    return [row for row in rows if not row.extra]


def extra_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows that the paper leaves out, each with its reason in ``extra``."""
    return [row for row in rows if row.extra]


def on_the_host(term: str) -> str:
    """The name of the row for a copy in the host's memory."""
    return f"{term}, on the host"


def on_device(rows: Iterable[Row], terms: LayerTerms, recompute: Mode, element_size: int) -> list[Row]:
    """What stays on the device of the rows of a layer that keeps everything: compressed terms in 260 bytes a block."""
    dropped, stored = terms.dropped(recompute), terms.stored(recompute)
    left = [row for row in rows if row.term not in dropped and stored.get(row.term) != "offload"]
    blocks = {row.term: -(-row.bytes // (element_size * BLOCK)) for row in left}
    compressed = {term for term, action in stored.items() if action == "compress"}
    return [replace(row, bytes=blocks[row.term] * BLOCK_BYTES) if row.term in compressed else row for row in left]


def on_host(rows: Iterable[Row], terms: LayerTerms, recompute: Mode) -> list[Row]:
    """The rows that move to the host, renamed by ``on_the_host``.  rows: those of a layer that keeps everything."""
    offloaded = {term for term, action in terms.stored(recompute).items() if action == "offload"}
    parts = dict.fromkeys(terms.one_tensor, on_the_host(", ".join(terms.one_tensor)))
    return merge(
        replace(row, term=parts.get(row.term) or on_the_host(row.term)) for row in rows if row.term in offloaded
    )


@dataclass(frozen=True)
class Match:
    """One term, predicted and measured; None on a side that does not have it."""

    term: str
    predicted: int | None
    measured: int | None

    @property
    def difference(self) -> int:
        """Measured minus predicted bytes; a side without the term counts as 0."""
        return (self.measured or 0) - (self.predicted or 0)


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare``; terms in the order of the prediction, then of the measurement.

    matched: on both sides with the same bytes.  changed: on both sides with different bytes.
    missing: predicted but not measured.  extra: measured but not predicted.
    """

    matched: tuple[Match, ...]
    changed: tuple[Match, ...]
    missing: tuple[Match, ...]
    extra: tuple[Match, ...]

    @property
    def exact(self) -> bool:
        """True when every term is on both sides with the same bytes."""
        return not (self.changed or self.missing or self.extra)

    @property
    def difference(self) -> int:
        """Measured minus predicted bytes over all terms."""
        return sum(match.difference for match in self.changed + self.missing + self.extra)

    def describe(self) -> str:
        """One line for each disagreement, or one line that says there is none."""
        if self.exact:
            return f"all {len(self.matched)} terms agree to the byte"
        lines = [f"{m.term}: predicted {m.predicted:,} B, measured {m.measured:,} B" for m in self.changed]
        lines += [f"{m.term}: predicted {m.predicted:,} B, not measured" for m in self.missing]
        lines += [f"{m.term}: measured {m.measured:,} B, not predicted" for m in self.extra]
        return "\n".join(lines)


def by_term(rows: Iterable[Row]) -> dict[str, int]:
    """Bytes by term, rows of one term added up, in order of first appearance."""
    sums: dict[str, int] = {}
    for row in rows:
        sums[row.term] = sums.get(row.term, 0) + row.bytes
    return sums


def merge(rows: Iterable[Row]) -> list[Row]:
    """One row a term: bytes added up, the rest as in the term's first row."""
    rows = list(rows)
    first = {row.term: row for row in reversed(rows)}
    return [replace(first[term], bytes=size) for term, size in by_term(rows).items()]


def compare(predicted: Iterable[Row], measured: Iterable[Row]) -> Comparison:
    """Match two sets of rows by term.  Rows of 0 bytes count as absent."""
    left = {term: size for term, size in by_term(predicted).items() if size}
    right = {term: size for term, size in by_term(measured).items() if size}
    both = [Match(term, left[term], right[term]) for term in left if term in right]
    return Comparison(
        matched=tuple(m for m in both if not m.difference),
        changed=tuple(m for m in both if m.difference),
        missing=tuple(Match(term, left[term], None) for term in left if term not in right),
        extra=tuple(Match(term, None, right[term]) for term in right if term not in left),
    )
