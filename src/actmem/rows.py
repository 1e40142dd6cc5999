"""Rows: the common form of predictions and measurements, a name and its bytes.

A formula returns rows, a ledger returns rows, and ``compare`` matches them by name (``term``). Tables, bars and labs
show rows.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from actmem.config import ConfigError
from actmem.recipes import BLOCK, BLOCK_BYTES, PAPER_LAYER, LayerTerms, Mode

#: The 15 tensors that one layer keeps, in the order of the forward pass (2205.05198 section 4.1).
LAYER_TERMS = (PAPER_LAYER.input, *(recipe.term for recipe in PAPER_LAYER.recipes))


#: Units of bytes, the largest first.
BINARY_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(frozen=True)
class Row:
    """Bytes of one stored tensor, or of one named group of tensors, on one rank.

    Attributes:
        term: the tensor's name, the same in predictions and measurements, such as "GeLU input".
        bytes: how many bytes one rank holds, a whole number.
        split_by: into how many shards the tensor is split over the ranks; 1 if every rank has all of it.
        source: where the bytes come from: an equation, or the module and operation that saved the tensor.
        extra: why the paper doesn't count this tensor; "" for a tensor that the paper counts.
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
    """Return the bytes of all rows together."""
    return sum(row.bytes for row in rows)


def paper_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that the paper counts."""
    return [row for row in rows if not row.extra]


def extra_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows that the paper leaves out, each with its reason in ``extra``."""
    return [row for row in rows if row.extra]


def on_the_host(term: str) -> str:
    """Return the name that a tensor's row has if the tensor is offloaded: ``term`` with ", on the host"."""
    return f"{term}, on the host"


def on_device(rows: Iterable[Row], terms: LayerTerms, recompute: Mode, element_size: int) -> list[Row]:
    """Return the rows that a layer saves in the device's memory in a mode of recomputation.

    Recomputed and offloaded tensors are left out. Compressed tensors have fewer bytes: 260 for each 256 elements.

    Args:
        rows: a row for each tensor that the layer saves without recomputation.
        terms: the table of this kind of layer's tensors, such as ``recipes.PAPER_LAYER``.
        recompute: a mode such as "selective", a set of tensors' names to recompute, or a dict from names to actions
            such as "offload".
        element_size: bytes of an activation element.
    """
    dropped, stored = terms.dropped(recompute), terms.stored(recompute)
    kept_rows = [row for row in rows if row.term not in dropped and stored.get(row.term) != "offload"]
    blocks = {row.term: -(-row.bytes // (element_size * BLOCK)) for row in kept_rows}
    compressed = {term for term, action in stored.items() if action == "compress"}
    return [replace(row, bytes=blocks[row.term] * BLOCK_BYTES) if row.term in compressed else row for row in kept_rows]


def on_host(rows: Iterable[Row], terms: LayerTerms, recompute: Mode) -> list[Row]:
    """Return the rows that a layer offloads to the host's memory; their names end with ", on the host".

    Args:
        rows: a row for each tensor that the layer saves without recomputation.
        terms: the table of this kind of layer's tensors, such as ``recipes.PAPER_LAYER``.
        recompute: a dict from tensors' names to actions; without an "offload" in it, or with any other mode, nothing is
            offloaded.
    """
    offloaded = {term for term, action in terms.stored(recompute).items() if action == "offload"}
    parts = dict.fromkeys(terms.one_tensor, on_the_host(", ".join(terms.one_tensor)))
    return merge(
        replace(row, term=parts.get(row.term) or on_the_host(row.term)) for row in rows if row.term in offloaded
    )


def size_text(size_bytes: int) -> str:
    """Return a number of bytes as text with three digits and a binary unit: ``2.67 GiB``."""
    for unit, name in BINARY_UNITS:
        if abs(size_bytes) >= unit:
            return f"{three_digits(size_bytes / unit)} {name}"
    return f"{size_bytes} B"


def three_digits(value: float) -> str:
    """Return a number with three significant digits and without an exponent: ``2.67``, ``26.7``, ``2,670``."""
    if value == 0:
        return "0"
    magnitude = int(f"{abs(value):e}".partition("e")[2])
    return f"{value:,.{max(0, 2 - magnitude)}f}"


@dataclass(frozen=True)
class Match:
    """The predicted and the measured bytes of one term.

    Attributes:
        term: the tensor's name.
        predicted: predicted bytes; None if no formula predicts the term.
        measured: measured bytes; None if the term wasn't measured.
    """

    term: str
    predicted: int | None
    measured: int | None

    @property
    def difference(self) -> int:
        """Measured minus predicted bytes; None counts as 0."""
        return (self.measured or 0) - (self.predicted or 0)

    def describe(self) -> str:
        """Return the predicted and the measured bytes as one line of text."""
        predicted = "" if self.predicted is None else f"predicted {self.predicted:,} B, "
        measured = "not measured" if self.measured is None else f"measured {self.measured:,} B"
        return f"{self.term}: {predicted}{measured}" + ("" if predicted else ", not predicted")


@dataclass(frozen=True)
class Comparison:
    """The result of ``compare``.

    Attributes:
        matches: one Match for each term, in the order of the prediction, followed by the terms that were only measured.
    """

    matches: tuple[Match, ...]

    @property
    def unequal(self) -> list[Match]:
        """The matches that disagree: the name is only predicted or only measured, or the bytes differ."""
        return [match for match in self.matches if match.difference]

    @property
    def exact(self) -> bool:
        """True if every name is both predicted and measured, with the same bytes."""
        return not self.unequal

    @property
    def difference(self) -> int:
        """Measured minus predicted bytes over all terms."""
        return sum(match.difference for match in self.matches)

    def describe(self) -> str:
        """Return one line for each disagreement, or one line that says that all terms agree."""
        lines = [match.describe() for match in self.unequal]
        return "\n".join(lines) or f"all {len(self.matches)} terms agree to the byte"


def by_term(rows: Iterable[Row]) -> dict[str, int]:
    """Return a dict from each term to its bytes, in order of first appearance; rows with the same term are added up."""
    sums: dict[str, int] = {}
    for row in rows:
        sums[row.term] = sums.get(row.term, 0) + row.bytes
    return sums


def merge(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each term: it has the sum of the bytes of the term's rows, and all else from the first row."""
    rows = list(rows)
    first = {row.term: row for row in reversed(rows)}
    return [replace(first[term], bytes=size) for term, size in by_term(rows).items()]


def compare(predicted: Iterable[Row], measured: Iterable[Row]) -> Comparison:
    """Return a Comparison of predicted with measured bytes, term by term. Rows of 0 bytes count as absent."""
    left, right = ({term: size for term, size in by_term(rows).items() if size} for rows in (predicted, measured))
    return Comparison(tuple(Match(term, left.get(term), right.get(term)) for term in {**left, **right}))
