"""Chapter 10: the peak memory of the loss, compared with what the layers save."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from actmem.config import Parallel
from actmem.rows import Row, total
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.marks import Drawing
from actmem_course.figures.step_timeline import step_timeline
from actmem_course.figures.style import FILLS, VERMILION, Fill
from actmem_more.llama_shape import LlamaShape
from actmem_more.llama_terms import llama_rows
from actmem_more.loss_peak import LOSSES, loss_peak_rows

if TYPE_CHECKING:  # pages have no torch
    from actmem.ledger.ledger_tables import SavedTensor
    from actmem.ledger.whole_step import StepBill

_NAMES = {
    "float32": "loss, float32 logits",
    "16 bits": "loss, 16-bit logits",
    "in place": "loss, softmax in place",
    "in chunks": "loss, a chunk at a time",
}
_LAYERS = "the layers"
_FILLS = {
    _LAYERS: FILLS["activations"],
    "logits, their gradient": FILLS["logits and loss"],
    "P or log P, its gradient": FILLS["softmax"],
    "input, its gradient": FILLS["input of a linear"],
    "gradient of the weight": FILLS["gradients"],
}
#: The fill of each part of the loss's timeline; a gradient has the colour of its tensor.
_MOMENTS = {
    "weight": FILLS["weights"],
    "gradient of the weight": FILLS["gradients"],
    "input, its gradient": FILLS["input of a linear"],
    "logits": FILLS["logits and loss"],
    "log P": FILLS["softmax"],
    "gradient of log P": Fill(VERMILION, "x"),
    "gradient of the logits": Fill(FILLS["logits and loss"].colour, "\\"),
}


def _kind(row: Row) -> str:
    """Return the entry of the legend that a row's term belongs to."""
    last = row.term.split()[-1]
    kinds = {"logits": "logits, their gradient", "softmax": "P or log P, its gradient"}
    kinds["weight"] = kinds["gradient"] = "gradient of the weight"
    return kinds.get(last, "input, its gradient")


def loss_bars(shape: LlamaShape, t: int = 1, recompute: str = "none") -> Drawing:
    """Draw the bytes that all layers save on one of t ranks, and the peaks of four ways to compute the loss.

    The bytes are those of one microbatch, in 16 bits.

    Args:
        shape: The model's sizes, with ``num_layers`` and ``vocab_size``.
        t: How many ranks share the layers, by tensor and sequence parallelism, and the loss.
        recompute: What backward recomputes in the layers: a mode such as "none", "selective" or "full".
    """
    layers = shape.num_layers * total(llama_rows(shape, Parallel(t, t > 1), recompute))
    tokens = shape.seq_length * shape.micro_batch_size
    peaks = {
        loss: [row for row in loss_peak_rows(loss, tokens, shape.hidden_size, shape.vocab_size, t) if row.bytes]
        for loss in LOSSES
    }
    parts: dict[str, dict[str, float]] = {_LAYERS: {_LAYERS: layers}, **{kind: {} for kind in list(_FILLS)[1:]}}
    for loss, rows in peaks.items():
        for row in rows:
            part = parts[_kind(row)]
            part[_NAMES[loss]] = part.get(_NAMES[loss], 0) + row.bytes
    whole, chunked = (Fraction(total(peaks[loss]), layers) for loss in ("16 bits", "in chunks"))
    terms = {_NAMES[loss]: "<br>".join(f"{row.term}: {row.bytes:,} B" for row in rows) for loss, rows in peaks.items()}
    return bar_chart(
        f"The loss of 16-bit logits takes {float(whole):.0%} of what {shape.num_layers} layers save,<br>"
        f"a chunk at a time {float(chunked):.0%}",
        parts,
        f"on one rank, s = {shape.seq_length:,}, v = {shape.vocab_size:,}, t\u00a0=\u00a0{t}",
        fills=list(_FILLS.values()),
        order=[_LAYERS, *_NAMES.values()],
        about=terms,
    )


def loss_timeline(bill: StepBill, vocab_size: int, of: str) -> Drawing:
    """Draw the bytes alive over a step of the output layer and the loss: the weight, logits, log P, and gradients.

    Args:
        bill: The record of the step that ``watch_step`` made: every tensor, when it was alive, and its bytes.
        vocab_size: Size of the vocabulary. A tensor whose last dimension has this size is taken to be the logits, log P
            or the gradient of one of them.
        of: Name of the loss, for the title.
    """

    def part_of(row: SavedTensor) -> str:
        if row.kind == "weight":
            return "weight"
        if row.shape[:1] == (vocab_size,):
            return "gradient of the weight"
        if row.shape[-1:] != (vocab_size,):
            return "input, its gradient" if len(row.shape) > 1 else "everything else"
        if row.kind == "activation":
            return "log P"
        if row.op == "nll_loss_backward":
            return "gradient of log P"
        # A chunk's float32 logits become their own gradient, which is rounded to 16 bits then.
        is_gradient = row.kind == "made by backward" and row.op != "mm" and row.dtype.itemsize == 2
        return "gradient of the logits" if is_gradient else "logits"

    return step_timeline(bill, of, _MOMENTS, part_of)
