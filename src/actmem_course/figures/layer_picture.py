"""The one picture of the course: a transformer layer, a row for each tensor that it saves for backward.

A box is as wide as its bytes, in the colour of its kind (``style.FILLS``).  Each rank has a column, so that a sharded
tensor is narrow in all of them, and a copied one as wide as ever.  What is recomputed is hatched, what is offloaded
stands in a column of its own, and a collective is a row of arrows between the ranks with the bytes that each sends.

``layer_picture`` draws all of it, the paper's layer and today's.  Every number comes from actmem's formulas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from actmem.config import ConfigError, ModelShape, Parallel, check_choice
from actmem.formulas.activations import layer_rows
from actmem.formulas.communication import Exchange, activation_bytes
from actmem.recipes import PAPER_LAYER, LayerTerms, Mode
from actmem.rows import Row
from actmem_course.figures.diagrams import EMPTY, Box, boxes, diagram, labels
from actmem_course.figures.marks import Drawing, line
from actmem_course.figures.style import FILLS, INK
from actmem_course.figures.terms import formula_of, term_of
from actmem_course.figures.units import axis_unit, size_text, three_digits

#: More ranks than this are not drawn: their columns would be too narrow.
MOST_RANKS = 8
#: Which collectives are drawn.
PASSES = ("", "forward", "backward")
#: Pixels: a row of a tensor, its box, a row of a collective, the ranks' names.
_ROW, _BOX, _TRANSFER, _HEAD = 27, 21, 34, 24
#: Pixels of a letter of the words beside the boxes, and the room between two ranks, as a share of all columns.
_LETTER, _WORDS, _GAP = 6.7, 13, 0.035
#: Pixels of all columns on a narrow page, in pixels of a wide page's words.
_NARROWEST = 200
#: Between a box and its words: one that no page takes away.
_SPACE = "\u00a0"
#: Widths of arrows that carry a shard, and all of a tensor.
_THIN, _THICK = 1.5, 4.0
#: Places along x and y of a line.
Stroke = tuple[Sequence[float], Sequence[float]]
#: Which way a collective's bytes go in and out: one rank's shard, or the whole tensor.
_ENDS = {"all-reduce": (_THICK, _THICK), "all-gather": (_THIN, _THICK), "reduce-scatter": (_THICK, _THIN)}


@dataclass(frozen=True)
class Block:
    """One saved tensor in the picture.

    Attributes:
        row: As one rank saves it if nothing is recomputed.
        whole: Bytes of the tensor without any parallelism.
        held: Bytes that stay on the device; 0 if the tensor is recomputed or offloaded.
        action: What becomes of it: one of ``recipes.ACTIONS``.
        gathered: Bytes that backward gathers from the other ranks for a moment.
    """

    row: Row
    whole: int
    held: int
    action: str = "keep"
    gathered: int = 0

    @property
    def is_copied(self) -> bool:
        """Whether every rank has all of it."""
        return self.row.bytes == self.whole


@dataclass(frozen=True)
class Transfer:
    """A collective in the picture.

    Attributes:
        exchange: What is sent.
        after: The term below whose row it is drawn.
        name: What stands beside it; its kind if empty.
    """

    exchange: Exchange
    after: str
    name: str = ""


def layer_picture(
    shape: ModelShape,
    parallel: Parallel = Parallel(),
    recompute: Mode = "none",
    *,
    collectives: str = "",
    stored: int | None = None,
    title: str = "",
) -> Drawing:
    """The layer with all that it saves for backward on each rank.

    Args:
        shape: The paper's layer.
        parallel: t ranks share it, under sequence parallelism or not; at most MOST_RANKS of them are drawn.
        recompute: A mode, a set of terms to recompute, or an action for each term, as ``layer_rows`` takes it.
        collectives: "forward" or "backward" draws the pass's collectives between the ranks; "" none.
        stored: How many tensors the forward pass has stored so far; None for all.  The last one is framed.
        title: In place of the finding that the picture states by itself.

    Returns:
        A drawing whose boxes are as wide as their bytes.

    Raises:
        ConfigError: If the ranks can't share the layer, a set can't be recomputed, or another argument is out of range.
    """
    check_choice("collectives", collectives, PASSES)
    blocks = paper_blocks(shape, parallel, recompute, collectives == "backward")
    if stored is not None and not 1 <= stored <= len(blocks):
        raise ConfigError("stored", f"must be from 1 to {len(blocks)}, got {stored}")
    moves = paper_transfers(shape, parallel, collectives) if collectives else []
    sketch = Sketch(blocks, parallel.tensor_parallel_size, shape, collectives == "backward")
    sketch.draw(moves, len(blocks) if stored is None else stored, framed=stored is not None)
    a, b, h, s = shape.letters()
    finding = title or _finding(blocks, parallel, stored)
    about = f"One layer at s={s}, b={b}, h={h}, a={a}, t={parallel.tensor_parallel_size}"
    return sketch.drawing(finding, f"{about}: {sketch.told(moves)}.")


def paper_blocks(
    shape: ModelShape, parallel: Parallel = Parallel(), recompute: Mode = "none", gathers_again: bool = False
) -> list[Block]:
    """The 15 tensors of the paper's layer.  gathers_again: with what backward gathers under sequence parallelism."""
    whole, shards = layer_rows(shape), layer_rows(shape, parallel)
    held = {row.term: row.bytes for row in layer_rows(shape, parallel, recompute)}
    actions = _actions(PAPER_LAYER, recompute)
    again = ("QKV projection input", "h→4h input") if gathers_again and parallel.sequence_parallel else ()
    return [
        Block(
            row, all_of_it.bytes, held.get(row.term, 0), actions.get(row.term, "keep"),
            all_of_it.bytes - row.bytes if row.term in again else 0,
        )
        for row, all_of_it in zip(shards, whole, strict=True)
    ]  # fmt: skip


def _actions(terms: LayerTerms, recompute: Mode) -> dict[str, str]:
    return {**dict.fromkeys(terms.dropped(recompute), "recompute"), **terms.stored(recompute)}


def paper_transfers(shape: ModelShape, parallel: Parallel, phase: str) -> list[Transfer]:
    """The collectives of one pass, each below the tensor that it follows in the forward pass.

    f and g stand at the inputs of the two column-parallel matmuls, f̄ and ḡ behind the two row-parallel ones.
    """
    t = parallel.tensor_parallel_size
    if t == 1:
        return []

    def after(kind: str, *terms: str, name: str = "") -> list[Transfer]:
        exchange = Exchange(kind, phase, "", t, activation_bytes(shape, 2))
        return [Transfer(exchange, term, name) for term in terms]

    starts, ends = ("QKV projection input", "h→4h input"), ("attention projection input", "4h→h input")
    if not parallel.sequence_parallel:
        return after("all-reduce", *(ends if phase == "forward" else starts))
    if phase == "forward":
        return after("all-gather", *starts) + after("reduce-scatter", *ends)
    again = after("all-gather", *starts, name="all-gather again")
    return again + after("reduce-scatter", *starts) + after("all-gather", *ends)


def _finding(blocks: Sequence[Block], parallel: Parallel, stored: int | None) -> str:
    """What the picture shows, in two lines at most."""
    held, t = sum(block.held for block in blocks), parallel.tensor_parallel_size
    if stored is not None:
        now, so_far = blocks[stored - 1], sum(block.held for block in blocks[:stored])
        return (
            f"{stored} of {len(blocks)}, {now.row.term}: {size_text(now.held)};<br>"
            f"stored so far {size_text(so_far)} of {size_text(held)}"
        )
    who = f"Each of {t} ranks" if t > 1 else "One layer"
    gone = {
        name: size_text(size)
        for action, name in (("recompute", "recomputed"), ("offload", "on the host"))
        if (size := sum(block.row.bytes for block in blocks if block.action == action))
    }
    if gone:
        rest = ", ".join(f"{size} {name}" for name, size in gone.items())
        return f"{who} saves {size_text(held)} on the GPU;<br>{rest}"
    says = f"{who} saves {size_text(held)} for backward"
    copied = [block for block in blocks if block.is_copied]
    if t > 1 and copied:
        return f"{says};<br>{size_text(sum(block.held for block in copied))} of it is a copy of what the others save"
    if t > 1:
        return f"{says};<br>no byte is there twice"
    most = max(blocks, key=lambda block: block.held)
    return f"{says},<br>{most.held / held:.0%} of it one tensor: {most.row.term}"


@dataclass
class Sketch:
    """A picture while it is drawn, from the top down, in pixels; x counts bytes.

    Attributes:
        blocks: The rows.
        of_ranks: How many ranks there are; the picture has columns for MOST_RANKS of them.
        shape: For the letters of the blocks' formulas.
        is_backward: Whether collectives bring bytes upwards.
    """

    blocks: Sequence[Block]
    of_ranks: int
    shape: Any
    is_backward: bool = False
    drawn: list[Box] = field(default_factory=list)
    names: list[tuple[float, float, str]] = field(default_factory=list)
    sizes: list[tuple[float, float, str]] = field(default_factory=list)
    heads: list[tuple[float, float, str]] = field(default_factory=list)
    strokes: dict[tuple[float, bool], list[Stroke]] = field(default_factory=dict)
    y: float = 0

    def __post_init__(self) -> None:
        self.ranks = min(self.of_ranks, MOST_RANKS)
        self.column = max(max(block.row.bytes, block.held + block.gathered) for block in self.blocks)
        offloaded = [block.row.bytes for block in self.blocks if block.action == "offload"]
        self.host = max(offloaded, default=0)
        self.gap = _GAP * (self.ranks * self.column + self.host)
        self.unit, self.unit_name = axis_unit(min(block.row.bytes for block in self.blocks if block.row.bytes))

    def left_of(self, rank: int) -> float:
        """Where a rank's column begins; that of the host comes after the last rank's."""
        return rank * (self.column + self.gap)

    @property
    def width(self) -> float:
        """Of all columns."""
        return self.left_of(self.ranks) - self.gap + (self.gap + self.host if self.host else 0)

    def draw(self, moves: Iterable[Transfer], stored: int, framed: bool) -> None:
        """All rows, each with the collectives that follow it."""
        moves = list(moves)
        self._heads()
        for number, block in enumerate(self.blocks, 1):
            self._row(block, number <= stored)
            if framed and number == stored:
                edge = Box(0, self.y - _ROW, max(block.row.bytes, 0.004 * self.width), _BOX, EMPTY)
                self._stroke(_THICK, *edge.outline())
            for move in moves:
                if move.after == block.row.term:
                    self._transfer(move)

    def _heads(self) -> None:
        if self.ranks == 1 and not self.host:
            return
        for rank in range(self.ranks):
            is_last_of_many = rank == self.ranks - 1 < self.of_ranks - 1
            name = f"rank {rank}" if 1 < self.ranks <= 4 else str(rank)
            name = "GPU" if self.ranks == 1 else f"… {self.of_ranks - 1}" if is_last_of_many else name
            self.heads.append((self.left_of(rank) + self.column / 2, _HEAD / 2, name))
        if self.host:
            self.heads.append((self.left_of(self.ranks) + self.host / 2, _HEAD / 2, "host"))
        self.y = _HEAD

    def _row(self, block: Block, is_stored: bool) -> None:
        """One tensor on all ranks, its name before the first box, its bytes after the last."""
        size, about = block.row.bytes, term_of(block.row)
        for rank in range(self.ranks):
            self._boxes(block, rank, is_stored)
        end = self.left_of(self.ranks - 1) + max(size, block.held + block.gathered)
        if block.action == "offload":
            at = self.left_of(self.ranks)
            hover = f"<b>{block.row.term}</b> in the host's memory: {size:,} B"
            self.drawn.append(Box(at, self.y, size, _BOX, FILLS[about.kind], "", hover))
            self._stroke(_THIN, [end, at], [self.y + _BOX / 2] * 2, has_head=True)
            end = at + size
        self.names.append((0, self.y + _BOX / 2, f"{block.row.term}{_SPACE}"))
        if is_stored:
            self.sizes.append((end, self.y + _BOX / 2, self._said(block)))
        self.y += _ROW

    def _boxes(self, block: Block, rank: int, is_stored: bool) -> None:
        """A tensor's box on one rank: what is held in its colour, what has gone as a frame."""
        x, size, about = self.left_of(rank), block.row.bytes, term_of(block.row)
        where = "" if self.ranks == 1 else f", rank {rank}" + (", a copy of all of it" if block.is_copied else "")
        hover = f"<b>{block.row.term}</b>{where}<br>{block.held:,} B<br>{about.why}"
        if block.action == "recompute":
            hover = f"<b>{block.row.term}</b>{where}<br>not saved: recomputed in backward, {size:,} B"
        if not is_stored or block.held < size:
            look = FILLS["recomputed"] if is_stored and block.action == "recompute" else EMPTY
            self.drawn.append(Box(x, self.y, size, _BOX, look, "", hover))
        if is_stored and block.held:
            self.drawn.append(Box(x, self.y, block.held, _BOX, FILLS[about.kind], "", hover))
        if block.gathered:
            said = f"<b>{block.row.term}</b>{where}<br>gathered again for a moment: {block.gathered:,} B"
            self.drawn.append(Box(x + block.held, self.y, block.gathered, _BOX, FILLS["transient"], "", said))

    def _said(self, block: Block) -> str:
        if block.action == "recompute":
            return f"{_SPACE}<i>recomputed</i>"
        number = f"{three_digits((block.held or block.row.bytes) / self.unit)} {self.unit_name}"
        formula = formula_of(block.row, self.shape) if block.action != "compress" else "8 bits"
        copied = " copied" if self.ranks > 1 and block.is_copied else ""
        return f"{_SPACE}<b>{formula}</b> {number}{copied}"

    def _transfer(self, move: Transfer) -> None:
        """A row of arrows: down into the ranks' exchange and out of it, upwards in backward."""
        top, bottom = self.y - 2, self.y + _TRANSFER - 6
        middle = (top + bottom) / 2
        before, after = (bottom, top) if self.is_backward else (top, bottom)
        width_in, width_out = _ENDS[move.exchange.kind]
        middles = [self.left_of(rank) + self.column / 2 for rank in range(self.ranks)]
        self._stroke(_THIN, [middles[0], middles[-1]], [middle] * 2)
        for x in middles:
            self._stroke(width_in, [x, x], [before, middle])
            self._stroke(width_out, [x, x], [middle, after], has_head=True)
        self.names.append((0, middle, f"<i>{move.name or move.exchange.kind}</i>{_SPACE}"))
        sent = f"{three_digits(move.exchange.wire_bytes / self.unit)} {self.unit_name} sent"
        self.sizes.append((middles[-1] + 0.3 * self.gap, middle, f"{_SPACE}<i>{sent}</i>"))
        self.y += _TRANSFER

    def _stroke(self, width: float, x: Sequence[float], y: Sequence[float], has_head: bool = False) -> None:
        self.strokes.setdefault((width, has_head), []).append((x, y))

    def _lines(self) -> list[dict]:
        """One trace for each width, because plotly takes a millisecond for a trace; arrows have a head at their end."""
        traces = []
        for (width, has_head), strokes in self.strokes.items():
            x = [place for xs, _ in strokes for place in (*xs, None)]
            y = [place for _, ys in strokes for place in (*ys, None)]
            head: dict[str, Any] = {}
            if has_head:
                sizes = [size for xs, _ in strokes for size in (*[0] * (len(xs) - 1), 7 + 1.5 * width, 0)]
                marker = {"symbol": "arrow", "angleref": "previous", "size": sizes, "color": INK, "opacity": 1}
                head = {"mode": "lines+markers", "marker": marker}
            traces.append(line("", x, y, INK, width=width, showlegend=False, **head))
        return traces

    def drawing(self, title: str, alt: str) -> Drawing:
        """The picture with its title; words stand beside the boxes, in margins of their own."""
        letters = max(len(text) - 7 * ("<i>" in text) for *_, text in self.names)
        # A size may begin before the columns end, by a few pixels at least on the narrowest page.
        beyond = max((len(text) - 7) * _LETTER - (1 - x / self.width) * _NARROWEST for x, _, text in self.sizes)
        names = {**labels(self.names, _WORDS, "middle left"), "meta": "names"}
        words = [names, labels(self.sizes, _WORDS, "middle right")]
        if self.heads:
            words.append(labels(self.heads, _WORDS))
        return diagram(
            title, [*boxes(self.drawn, _WORDS), *self._lines(), *words], alt,
            1.001 * self.width, self.y, round(self.y) + 88,
            margins=(round(_LETTER * letters) + 10, max(16, round(beyond) + 10)),
        )  # fmt: skip

    def told(self, moves: Iterable[Transfer]) -> str:
        """The picture in words."""
        said = []
        for block in self.blocks:
            what = {"recompute": "recomputed", "offload": f"{block.row.bytes:,} bytes on the host"}.get(block.action)
            copied = " on every rank" if self.ranks > 1 and block.is_copied else ""
            said.append(f"{block.row.term} {what or f'{block.held:,} bytes{copied}'}")
        sent = [
            f"{move.name or move.exchange.kind} after {move.after}, {move.exchange.wire_bytes:,} bytes sent by each"
            for move in moves
        ]
        held = f"each rank saves {sum(block.held for block in self.blocks):,} bytes"
        return "; ".join([held, *said, *sent])
