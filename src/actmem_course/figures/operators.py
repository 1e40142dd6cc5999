"""The four operators f, f̄, g and ḡ: what each makes of the ranks' tensors, forward and backward."""

from collections.abc import Sequence

from actmem.config import ModelShape
from actmem.formulas.communication import activation_bytes
from actmem_course.figures.diagrams import EMPTY, Box, boxes, diagram, labels
from actmem_course.figures.marks import Drawing
from actmem_course.figures.sketch import Stroke, arrows
from actmem_course.figures.style import FILLS, Fill
from actmem_course.figures.units import size_text

#: The collective of each operator in the forward pass.  In its backward pass it runs that of its conjugate.
FORWARD_COLLECTIVE = {"f": None, "f̄": "all-reduce", "g": "all-gather", "ḡ": "reduce-scatter"}
CONJUGATE_OF = {"f": "f̄", "f̄": "f", "g": "ḡ", "ḡ": "g"}
#: A tensor before and after each operator: whole on every rank, one term of a sum on each, or a shard along s.
_STATES = {
    "f": ("whole", "whole"),
    "f̄": ("partial", "whole"),
    "g": ("shard", "whole"),
    "ḡ": ("partial", "shard"),
}
#: The name of the tensor that each operator takes: X goes into a block, Z comes out of it.
_TENSORS = {"f": "X", "f̄": "Z", "g": "X", "ḡ": "Z"}
#: Fills: of a tensor that is the same on all ranks, or one rank's shard of it; and of one term of a sum.
COMPLETE, PARTIAL = FILLS["activations"], Fill("#FBE5B5", "/")

#: How many ranks are drawn; the width of a pass and of a tensor in it; where the second pass begins.
_RANKS, _PASS, _BOX, _BACKWARD = 2, 4.0, 1.15, 4.9
_LEFT, _ROW, _BAND, _HIGH, _AIR = 1.3, 1.15, 3.9, 0.8, 0.12


def operators(names: Sequence[str], shape: ModelShape) -> Drawing:
    """Draw some of the paper's operators f, f̄, g and ḡ: what each makes of the tensors of two ranks.

    There is a row for each operator. Its left half is the forward pass, with arrows to the right; its right half is the
    backward pass, with arrows to the left.

    Args:
        names: The operators: some of "f", "f̄", "g", "ḡ".
        shape: A layer's sizes; the collectives carry its activation [s, b, h] in 16 bits.
    """
    size = size_text(activation_bytes(shape, 2))
    drawn: list[Box] = []
    strokes: list[Stroke] = []
    words: list[tuple[float, float, str]] = []
    texts = []
    for band, name in enumerate(names):
        for pass_, operator, left in (("forward", name, _LEFT), ("backward", CONJUGATE_OF[name], _LEFT + _BACKWARD)):
            kind = FORWARD_COLLECTIVE[operator]
            text = f"{kind} of {size}" if kind else "identity"
            texts.append(f"{name} {pass_}: {text}")
            words.append((left + _PASS / 2, band * _BAND, f"<b>{name}</b>, {pass_} pass"))
            words.append((left + _PASS / 2, band * _BAND + 0.45, text))
            top = band * _BAND + 0.85
            tensor = ("d" if pass_ == "backward" else "") + _TENSORS[name]
            places = (left, left + _PASS - _BOX) if pass_ == "forward" else (left + _PASS - _BOX, left)
            for place, state in zip(places, _STATES[operator]):
                for rank in range(_RANKS):
                    drawn += _tensor(tensor, state, rank, place, top + rank * _ROW)
            strokes += _strokes(kind, *places, top)
        words += [(_LEFT / 2, band * _BAND + 0.85 + _HIGH / 2 + rank * _ROW, f"rank {rank}") for rank in range(_RANKS)]
    title = f"{' and '.join(names)}: the backward pass of one is the forward pass of the other"
    width, height = _LEFT + _BACKWARD + _PASS + 0.1, len(names) * _BAND - 0.6
    return diagram(
        f"{title};<br>hatched: one term of a sum", [*boxes(drawn), *arrows(2.5, True, strokes), labels(words, 13)],
        f"{title}. {'; '.join(texts)}.", width, height, 80 + 155 * len(names), top=-0.4,
    )  # fmt: skip


def _tensor(name: str, state: str, rank: int, x: float, y: float) -> list[Box]:
    if state == "partial":
        return [Box(x, y, _BOX, _HIGH, PARTIAL, f"{name}{'₀₁'[rank]}", f"rank {rank}'s term of {name}")]
    if state == "whole":
        return [Box(x, y, _BOX, _HIGH, COMPLETE, name, f"rank {rank} has all of {name}")]
    high = _HIGH / _RANKS
    shard = Box(x, y + rank * high, _BOX, high, COMPLETE, "", f"rank {rank} has its tokens of {name}")
    return [Box(x, y, _BOX, _HIGH, EMPTY), shard]


def _strokes(kind: str | None, before: float, after: float, top: float) -> list[Stroke]:
    """Return arrows from every tensor to those that it reaches: its own rank's, or with a collective all ranks'."""
    start, end = (before + _BOX + _AIR, after - _AIR) if before < after else (before - _AIR, after + _BOX + _AIR)
    middles = [top + rank * _ROW + _HIGH / 2 for rank in range(_RANKS)]
    return [
        ([start, end], [middles[sender], middles[receiver]])
        for sender in range(_RANKS)
        for receiver in range(_RANKS)
        if kind or sender == receiver
    ]
