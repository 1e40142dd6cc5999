"""Chapter 10: the peak of the loss beside what the layers save."""

from __future__ import annotations

from fractions import Fraction

from actmem.config import Parallel
from actmem.rows import Row, total
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.marks import Drawing
from actmem_course.figures.style import FILLS
from actmem_more.llama_shape import LlamaShape
from actmem_more.llama_terms import llama_rows
from actmem_more.loss_peak import LOSSES, loss_peak_rows

_NAMES = {
    "float32": "loss, float32 logits",
    "16 bits": "loss, 16-bit logits",
    "in place": "loss, softmax in place",
    "in chunks": "loss, a chunk at a time",
}
_LAYERS = "the layers"
_FILLS = {
    _LAYERS: FILLS["activations"],
    "logits or their gradient": FILLS["logits and loss"],
    "log P or P, and its gradient": FILLS["softmax"],
    "input (and its gradient)": FILLS["input of a linear"],
    "gradient of the weight": FILLS["gradients"],
}


def _kind(row: Row) -> str:
    """The entry of the legend that a term belongs to."""
    last = row.term.split()[-1]
    kinds = {"logits": "logits or their gradient", "softmax": "log P or P, and its gradient"}
    kinds["weight"] = kinds["gradient"] = "gradient of the weight"
    return kinds.get(last, "input (and its gradient)")


def loss_bars(shape: LlamaShape, t: int = 1, recompute: str = "none") -> Drawing:
    """What all layers save of one sequence, and the peak of the loss computed in four ways; one of t ranks, 16 bits."""
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
        f"16-bit logits take {float(whole):.2f} times what {shape.num_layers} layers save,<br>"
        f"the loss a chunk at a time {float(chunked):.2f} times",
        parts,
        f"on one rank, s = {shape.seq_length:,}, v = {shape.vocab_size:,}, t = {t}",
        fills=list(_FILLS.values()),
        order=[_LAYERS, *_NAMES.values()],
        about=terms,
    )
