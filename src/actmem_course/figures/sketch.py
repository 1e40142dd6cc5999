"""Draw the picture of a layer: a row for each saved tensor, a column for each rank, arrows for collectives.

``layer_picture`` decides what the rows are; this file draws the boxes, words and arrows.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actmem.formulas.communication import PredictedCollective, wire_bytes
from actmem.rows import Row
from actmem_course.figures.diagrams import EMPTY, Box, boxes, diagram, labels
from actmem_course.figures.marks import Drawing, line
from actmem_course.figures.style import FILLS, INK
from actmem_course.figures.terms import term_of
from actmem_course.figures.units import axis_unit, three_digits

#: More ranks than this are not drawn: their columns would be too narrow. Of ranks that hold the same, fewer are.
MOST_RANKS, MOST_ALIKE = 8, 4
#: Heights in pixels: a row of a tensor, its box, a row of a collective, a caption, the ranks' names.
_ROW, _BOX, _TRANSFER, _CAPTION, _HEAD = 25, 19, 30, 18, 24
#: Width of a letter and size of the words beside the boxes, in pixels; the gap between two ranks, as a share of all
#: columns.
_LETTER, _WORDS, _GAP = 7.5, 13, 0.035
#: Width of all columns on a narrow page, in pixels of a wide page's words.
_NARROWEST = 200
#: The space between a box and its words: a non-breaking one, which no page removes.
_SPACE = "\u00a0"
#: Widths of arrows that carry a shard, and all of a tensor.
_THIN, _THICK = 1.5, 4.0
#: The x and the y of the points of a line.
Stroke = tuple[Sequence[float], Sequence[float]]
#: Widths of the arrows into a collective and out of it on each rank: for a shard, or for the whole tensor.
_ENDS = {
    "all-reduce": (_THICK, _THICK),
    "all-gather": (_THIN, _THICK),
    "reduce-scatter": (_THICK, _THIN),
    "all-to-all": (_THIN, _THIN),
}


@dataclass(frozen=True)
class Block:
    """One tensor in the picture.

    Attributes:
        row: The tensor's name, and its bytes on one rank if nothing is recomputed.
        whole: The tensor's bytes without any parallelism.
        held: Its bytes on the device while it is there; fewer than the row's if it is compressed.
        action: What happens to the tensor: "keep", "recompute", "compress", "offload", or "not saved" if no gradient
            needs it.
        is_present: Whether the tensor is in the device's memory at the moment that the picture shows.
        gathered: Bytes that backward temporarily gathers from the other ranks.
        by_rank: The tensor's bytes on each rank, if they differ; else empty.
        formula: The formula of its bytes, such as ``2sbh/t``.
        split: A text that says how the ranks share the tensor, such as "sharded by heads".
    """

    row: Row
    whole: int
    held: int
    action: str = "keep"
    is_present: bool = True
    gathered: int = 0
    by_rank: tuple[int, ...] = ()
    formula: str = ""
    split: str = ""

    @property
    def absence(self) -> str:
        """A text that says why the tensor isn't in the device's memory, such as "recomputed"; "" if it is there."""
        words = {"recompute": "recomputed", "not saved": "not saved", "offload": "on the host"}
        return "" if self.is_present else words.get(self.action, "not in memory")

    @property
    def on_device(self) -> int:
        """The tensor's bytes in the device's memory at the moment that the picture shows.

        If its bytes differ from rank to rank, these are the most.
        """
        return max(self.by_rank, default=self.held) if self.is_present else 0

    def held_on(self, rank: int) -> int:
        """Return the tensor's bytes in the memory of rank ``rank`` at the moment that the picture shows."""
        return self.by_rank[rank] if self.by_rank and self.is_present else self.on_device

    def size_on(self, rank: int) -> int:
        """Return the tensor's bytes on rank ``rank``, whether or not it is in memory at that moment."""
        return self.by_rank[rank] if self.by_rank else self.row.bytes


@dataclass(frozen=True)
class Transfer:
    """A row of arrows below one row of the picture: collectives between the ranks.

    Attributes:
        collectives: The collectives, all of one kind.
        after: The name of the tensor below whose row the arrows are drawn.
        name: The text beside the arrows, such as "all-gather again".
        kind: How the arrows are drawn: "all-reduce", "all-gather", "reduce-scatter" or "all-to-all", or "ring" for
            arrows from rank to rank.
        gathers_again: Whether these are all-gathers with which backward gathers an input that was saved as a shard.
        most: Bytes that the busiest rank sends, if ranks send different amounts; else 0.
    """

    collectives: Sequence[PredictedCollective]
    after: str
    name: str
    kind: str
    gathers_again: bool = False
    most: int = 0

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank sends; if ranks send different amounts, those of the busiest rank."""
        return self.most or wire_bytes(self.collectives)


@dataclass
class Sketch:
    """The picture of a layer while it is being drawn, from the top down. y is in pixels, x in bytes.

    Attributes:
        blocks: The saved tensors, one for each row.
        of_ranks: How many ranks there are. The picture has at most MOST_RANKS columns; if all ranks hold the same
            bytes, at most MOST_ALIKE.
        is_backward: Whether arrows of collectives point upwards.
        drawn: The boxes drawn so far.
        names: Texts to the left of the boxes, the tensors' names, each with its x and y.
        sizes: Texts to the right of the boxes, the tensors' bytes, each with its x and y.
        heads: Texts above the columns, the ranks' numbers, each with its x and y.
        captions: Texts above rows, each with its x and y.
        later: Texts that appear to the right of the boxes at other moments; the margin must have room for them.
        strokes: Lines and arrows drawn so far, by their width and whether they have arrowheads.
        y: The y at which the next row begins.
    """

    blocks: Sequence[Block]
    of_ranks: int = 1
    is_backward: bool = False
    drawn: list[Box] = field(default_factory=list)
    names: list[tuple[float, float, str]] = field(default_factory=list)
    sizes: list[tuple[float, float, str]] = field(default_factory=list)
    heads: list[tuple[float, float, str]] = field(default_factory=list)
    captions: list[tuple[float, float, str]] = field(default_factory=list)
    later: list[tuple[float, float, str]] = field(default_factory=list)
    strokes: dict[tuple[float, bool], list[Stroke]] = field(default_factory=dict)
    y: float = 0

    def __post_init__(self) -> None:
        self.ranks = min(self.of_ranks, MOST_RANKS if any(block.by_rank for block in self.blocks) else MOST_ALIKE)
        self.column = max(
            max(*(block.size_on(rank) for rank in range(self.ranks)), block.row.bytes + block.gathered)
            for block in self.blocks
        )
        self.host = max((block.row.bytes for block in self.blocks if block.action == "offload"), default=0)
        self.gap = _GAP * (self.ranks * self.column + self.host)
        self.unit, self.unit_name = axis_unit(sorted(block.row.bytes for block in self.blocks)[len(self.blocks) // 2])

    def left_of(self, rank: int) -> float:
        """Return the x at which the column of rank ``rank`` begins.

        The column of the host's memory comes after that of the last rank: its number is that of the ranks.
        """
        return rank * (self.column + self.gap)

    @property
    def width(self) -> float:
        """The width of all columns together, in the unit of x."""
        return self.left_of(self.ranks) - self.gap + (self.gap + self.host if self.host else 0)

    def draw(
        self,
        moves: Sequence[Transfer] = (),
        captions: Mapping[str, str] = {},
        framed: str = "",
        marks_again: bool = False,
    ) -> None:
        """Draw all rows, each with its caption above it and its collectives below it.

        Args:
            moves: The collectives to draw.
            captions: Text above a row, by the name of the row's tensor.
            framed: The name of the tensor whose boxes get a thick frame; "" for none.
            marks_again: Whether recomputed tensors that are in memory get a thick frame, too.
        """
        self._heads()
        for block in self.blocks:
            if caption := captions.get(block.row.term):
                self.captions.append((0, self.y + _CAPTION / 2 - 1, f"<i>{caption}</i>"))
                self.y += _CAPTION
            self._row(block)
            if marks_again:
                self.later.append((*self.sizes[-1][:2], f"{_SPACE}{self._said(replace(block, is_present=True))}"))
            is_again = marks_again and block.action == "recompute" and block.is_present
            for rank in range(self.ranks if block.row.term == framed or is_again else 0):
                size = max(block.size_on(rank), 0.004 * self.width)
                self._stroke(_THICK, *Box(self.left_of(rank), self.y - _ROW, size, _BOX, EMPTY).outline())
            for move in moves:
                if move.after == block.row.term:
                    self._transfer(move)

    def _heads(self) -> None:
        if self.ranks == 1 and not self.host:
            return
        for rank in range(self.ranks):
            is_last_of_many = rank == self.ranks - 1 < self.of_ranks - 1
            name = "GPU" if self.ranks == 1 else f"… {self.of_ranks - 1}" if is_last_of_many else str(rank)
            self.heads.append((self.left_of(rank) + self.column / 2, _HEAD / 2, name))
        if self.ranks > 1:
            self.names.append((0, _HEAD / 2, f"rank{_SPACE}"))
        if self.host:
            self.heads.append((self.left_of(self.ranks) + self.host / 2, _HEAD / 2, "host"))
        self.y = _HEAD

    def _row(self, block: Block) -> None:
        """Draw one tensor on all ranks, with its name before the first box and its bytes after the last."""
        middle = self.y + _BOX / 2
        for rank in range(self.ranks):
            self._boxes(block, rank)
        end = self.left_of(self.ranks - 1) + block.size_on(self.ranks - 1) + block.gathered
        if block.action == "offload":
            at, size = self.left_of(self.ranks), block.row.bytes
            hover = f"<b>{block.row.term}</b> in the host's memory: {size:,} B"
            self.drawn.append(Box(at, self.y, size, _BOX, FILLS[term_of(block.row).kind], "", hover))
            self._stroke(_THIN, [at, end] if self.is_backward else [end, at], [middle] * 2, has_head=True)
            end = at + size
        self.names.append((0, middle, f"{block.row.term}{_SPACE}"))
        self.sizes.append((end, middle, f"{_SPACE}{self._said(block)}"))
        self.y += _ROW

    def _boxes(self, block: Block, rank: int) -> None:
        """Draw a tensor's box on one rank: what is held in its colour, what is not held as a frame."""
        x, size, about = self.left_of(rank), block.size_on(rank), term_of(block.row)
        held = block.held_on(rank)
        where = "" if self.ranks == 1 else f", rank {rank}, {block.split}"
        hover = f"<b>{block.row.term}</b>{where}<br>{held:,} B<br>{about.why}"
        if held < size:
            look = FILLS["recomputed"] if block.action == "recompute" else EMPTY
            said = hover if held else f"<b>{block.row.term}</b>{where}<br>{block.absence}: {size:,} B"
            self.drawn.append(Box(x, self.y, size, _BOX, look, "", said))
        if held:
            self.drawn.append(Box(x, self.y, held, _BOX, FILLS[about.kind], "", hover))
        if block.gathered:
            said = f"<b>{block.row.term}</b>{where}<br>gathered again for a moment: {block.gathered:,} B"
            self.drawn.append(Box(x + size, self.y, block.gathered, _BOX, FILLS["transient"], "", said))

    def _said(self, block: Block) -> str:
        """Return the words after the last box of a row."""
        if block.absence in ("recomputed", "not saved"):
            return f"<i>{block.absence}</i>"
        if block.absence == "not in memory":
            return ""
        if block.by_rank:
            return f"<b>{block.formula}</b> {self._in_unit(min(block.by_rank))} to {self._in_unit(max(block.by_rank))}"
        formula = "8 bits" if block.action == "compress" else block.formula
        return f"<b>{formula}</b> {self._in_unit(block.on_device or block.row.bytes)}"

    def _in_unit(self, size: float) -> str:
        return f"{three_digits(size / self.unit)} {self.unit_name}"

    def _transfer(self, move: Transfer) -> None:
        """Draw a row of arrows: down into the ranks' collective and out of it; upwards in backward."""
        top, bottom = self.y - 1, self.y + _TRANSFER - 6
        middle, ends = (top + bottom) / 2, (bottom, top) if self.is_backward else (top, bottom)
        middles = [self.left_of(rank) + self.column / 2 for rank in range(self.ranks)]
        if move.kind == "ring":
            for pair in zip(middles, middles[1:] + middles[:1]):
                self._stroke(_THIN, pair, ends, has_head=True)
        if move.kind in _ENDS:
            width_in, width_out = _ENDS[move.kind]
            self._stroke(_THIN, [middles[0], middles[-1]], [middle] * 2)
            for x in middles:
                self._stroke(width_in, [x, x], [ends[0], middle])
                self._stroke(width_out, [x, x], [middle, ends[1]], has_head=True)
        self.names.append((0, middle, f"<i>{move.name}</i>{_SPACE}"))
        self.sizes.append(
            (
                middles[-1] + 0.04 * self.width,  # beyond the head of the last arrow, on a narrow page too
                middle,
                f"{_SPACE}<i>{'up to ' if move.most else ''}{self._in_unit(move.sent_bytes)} sent</i>",
            )
        )
        self.y += _TRANSFER

    def _stroke(self, width: float, x: Sequence[float], y: Sequence[float], has_head: bool = False) -> None:
        self.strokes.setdefault((width, has_head), []).append((x, y))

    def drawing(self, title: str, alt: str) -> Drawing:
        """Return the finished picture, with margins wide enough for all texts.

        Args:
            title: The finding.
            alt: The alt text: the finding with its numbers.
        """
        names = {**labels(self.names, _WORDS, "middle left"), "meta": "names"}
        words = [names, labels(self.sizes, _WORDS, "middle right")]
        words += [labels(self.captions, 12, "middle right")] if self.captions else []
        words += [labels(self.heads, _WORDS)] if self.heads else []
        before = max(_letters(text) for *_, text in self.names) * _LETTER
        # A size may begin before the columns end, by a few pixels at least on the narrowest page.
        beyond = max(
            _letters(text) * _LETTER - (1 - x / self.width) * _NARROWEST for x, _, text in self.sizes + self.later
        )
        lines = [trace for look, strokes in self.strokes.items() for trace in arrows(*look, strokes)]
        return diagram(
            title, [*boxes(self.drawn, _WORDS), *lines, *words], alt,
            1.001 * self.width, self.y, round(self.y) + 88, margins=(round(before) + 10, max(16, round(beyond) + 10)),
        )  # fmt: skip

    def told(self, moves: Iterable[Transfer] = ()) -> str:
        """Return a text with the picture's content, for its alt text.

        Args:
            moves: The collectives that are drawn.
        """
        said = []
        for block in self.blocks:
            size = f"{'at most ' if block.by_rank else ''}{block.on_device or block.row.bytes:,} bytes"
            said.append(", ".join(filter(None, (f"{block.row.term} {size}", block.absence, block.split))))
        sent = [f"{move.name} after {move.after}, {_by(move)}" for move in moves]
        return "; ".join([f"each rank holds {self.total():,} bytes", *said, *sent])

    def total(self) -> int:
        """Return the bytes of all tensors in one rank's memory; if ranks differ, in that of the fullest rank."""
        return max(sum(block.held_on(rank) for block in self.blocks) for rank in range(self.ranks))


def _by(move: Transfer) -> str:
    """Return in words how much is sent, and by whom."""
    return f"{move.sent_bytes:,} bytes sent by {'the busiest' if move.most else 'each'}"


def arrows(width: float, has_head: bool, strokes: Sequence[Stroke]) -> list[dict]:
    """Return lines of one width as a single plotly trace, because plotly takes a millisecond for each trace.

    Args:
        width: The lines' width, in pixels.
        has_head: Whether each line ends in an arrowhead.
        strokes: For each line the x values and the y values of its points.

    Returns: a list with the trace; empty if there are no lines.
    """
    if not strokes:
        return []
    x = [place for xs, _ in strokes for place in (*xs, None)]
    y = [place for _, ys in strokes for place in (*ys, None)]
    head: dict[str, Any] = {}
    if has_head:
        sizes = [size for xs, _ in strokes for size in (*[0] * (len(xs) - 1), 7 + 1.5 * width, 0)]
        marker = {"symbol": "arrow", "angleref": "previous", "size": sizes, "color": INK, "opacity": 1}
        head = {"mode": "lines+markers", "marker": marker}
        width = _THIN if width == _THICK else width  # or it may look out beside the tip of its head
    return [line("", x, y, INK, width=width, showlegend=False, **head)]


def _letters(text: str) -> int:
    """Return how many letters are seen: the marks of bold and italic aren't."""
    for mark in ("<b>", "</b>", "<i>", "</i>"):
        text = text.replace(mark, "")
    return len(text)
