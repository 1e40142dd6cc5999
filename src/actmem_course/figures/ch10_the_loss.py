"""Chapter 10: the peak of the loss beside what the layers keep, and what the last pipeline stage does more than
others.
"""

from __future__ import annotations

from fractions import Fraction

from actmem.config import Parallel, check_divides
from actmem.rows import Row, total
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.marks import Drawing
from actmem_course.figures.style import FILLS
from actmem_more.llama_shape import LlamaShape
from actmem_more.llama_terms import llama_products, llama_rows
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
    """What all layers keep of one sequence, and the peak of the loss computed in four ways; one of t ranks, 16 bits."""
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
        f"16-bit logits take {float(whole):.2f} times what {shape.num_layers} layers keep,<br>"
        f"the loss a chunk at a time {float(chunked):.2f} times",
        parts,
        f"on one rank, s = {shape.seq_length:,}, v = {shape.vocab_size:,}, t = {t}",
        fills=list(_FILLS.values()),
        order=[_LAYERS, *_NAMES.values()],
        about=terms,
    )


def stage_work(shape: LlamaShape, p: int, shared: bool = False) -> Drawing:
    """Forward FLOPs of each of p pipeline stages, in layers; shared: each stage has 1/p of the vocabulary's output
    layer.
    """
    layers = check_divides("num_layers", shape.num_layers, "pipeline_parallel_size", p)
    tokens = shape.seq_length * shape.micro_batch_size
    output = Fraction(2 * tokens * shape.hidden_size * shape.vocab_size, sum(llama_products(shape).values()))
    ends = [float(output / p if shared else output * (stage == p - 1)) for stage in range(p)]
    longest = (layers + max(ends)) / layers
    finding = f"Every stage works {longest:.2f} times as long as its layers do" if shared else (
        f"The last stage works {longest:.2f} times as long as the others,<br>and they wait for it"
    )  # fmt: skip
    parts: dict[str, list[float]] = {"layers": [layers] * p, "output layer": ends}
    return bar_chart(
        finding,
        {part: {f"stage {stage}": size for stage, size in enumerate(sizes)} for part, sizes in parts.items()},
        "FLOPs of forward",
        "layers",
        room_for=layers + float(output),
        fills=[FILLS["number"], FILLS["second number"]],
    )
