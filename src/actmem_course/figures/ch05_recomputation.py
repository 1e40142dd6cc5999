"""Chapter 5: what recomputation frees and what it costs, over one training step."""

from fractions import Fraction

from actmem.config import PAPER_MODELS, ModelShape
from actmem.formulas.activations import TABLE2, closed_form, layer_rows
from actmem.formulas.flops import layer_overhead
from actmem.formulas.stages import selective_saves
from actmem.rows import total
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.layer_picture import layer_picture
from actmem_course.figures.marks import Drawing, chart, line, points, scale
from actmem_course.figures.style import CARD, FILLS, HELD, INK, Fill
from actmem_course.figures.units import axis_end, axis_unit, size_text
from actmem_course.predicted.recomputation import training_moments

_MODES = {"save everything": "none", "selective": "selective", "full": "full"}
LADDER = {
    "tensor": FILLS["others"],
    "tensor+sequence": Fill("#C9E8DD", "."),
    "tensor+selective": Fill("#8CCFB8", "-"),
    "tensor+sequence+selective": FILLS["ours"],
    "full": FILLS["recomputed"],
}


def recompute_trade(shape: ModelShape) -> Drawing:
    """Draw a layer's FLOPs in forward and backward for each mode of recomputation, relative to no recomputation.

    The values are in percent. Recomputation stops at the last tensor that backward reads.

    Args:
        shape: The layer's sizes.
    """
    added = {name: layer_overhead(shape, mode) for name, mode in _MODES.items()}
    recomputing = list(added)[1:]
    return bar_chart(
        f"s = {shape.seq_length:,}: without the core attention a layer saves {float(selective_saves(shape)):.0%} fewer "
        f"bytes,<br>for {_percent(added['selective'])} more FLOPs; full recomputation adds {_percent(added['full'])}",
        {
            "forward and backward": dict.fromkeys(added, 100),
            "recomputed": {name: 100 * float(added[name]) for name in recomputing},
        },
        "FLOPs of a layer",
        "%",
        fills=[FILLS["number"], FILLS["recomputed"]],
        notes={name: f"+{_percent(added[name])}" for name in recomputing},
    )


def _percent(share: Fraction) -> str:
    value = float(100 * share)
    return f"{value:.2f}%" if value < 10 else f"{value:.1f}%"


def training_step(shape: ModelShape, moment: int, recompute: str = "none") -> list[Drawing]:
    """Draw one moment of a training step.

    Args:
        shape: The model's sizes, with ``num_layers``.
        moment: The moment: an index into the tuple that ``training_moments`` returns.
        recompute: What backward recomputes: "none", "selective" or "full".

    Returns: two drawings: the tensors that the layer that runs has in memory, and a curve of the bytes of all layers
        over the step.
    """
    moments = training_moments(shape, recompute)
    now, sizes = moments[moment], [each.bytes for each in moments]
    in_memory = now.held[now.layer]
    unit, unit_name = axis_unit(total(layer_rows(shape)) * shape.num_layers)
    recomputed = [place for place, each in enumerate(moments) if each.again]
    held, peak = [size / unit for size in sizes], size_text(max(sizes))
    when = "the peak of the step" if now.bytes == max(sizes) else f"the peak of the step is {peak}"
    curve = chart(
        f"All {shape.num_layers} layers hold {size_text(now.bytes)} now:<br>{when}",
        [
            line("in memory", range(len(sizes)), held, HELD, width=2, shape="hv", fill="tozeroy"),
            points("recomputed", recomputed, [held[i] for i in recomputed], CARD, "recomputed", "triangle-up", 9, 1),
            line(
                "now", [moment, moment], [0, held[moment]], INK, width=2, mode="lines+markers",
                marker={"color": INK, "size": [0, 11]},
            ),
        ],
        f"A line of the bytes held by {shape.num_layers} layers, recomputation {recompute}, at moment {moment} of "
        f"{len(moments) - 1}: {now.bytes:,} bytes, {max(sizes):,} at the peak.",
        height=300,
        xaxis=scale(
            "forward pass, then backward pass, by saved tensor", 0, len(moments) - 1,
            showticklabels=False, showgrid=False, ticks="",
        ),
        yaxis=scale(f"in memory, {unit_name}", 0, axis_end(total(layer_rows(shape)) * shape.num_layers / unit)),
    )  # fmt: skip
    title = f"{now.says[0].upper()}{now.says[1:]}:<br>{size_text(total(in_memory))} of this layer in memory"
    terms = {row.term for row in in_memory}
    if not terms <= {row.term for row in layer_rows(shape, recompute=recompute)}:
        title += " (framed: recomputed)"
    return [layer_picture(shape, recompute=recompute, in_memory=terms, title=title), curve]


def memory_ladder(seq_length: int, tensor_parallel_size: int) -> Drawing:
    """Draw figure 7 of the paper: what a layer saves with each combination of methods, for the paper's four models.

    Bytes are in percent of the bytes with tensor parallelism alone.

    Args:
        seq_length: s, for all four models.
        tensor_parallel_size: t, for all four models.

    Raises:
        ConfigError: t ranks can't share a layer of one of the models.
    """
    rows = {row.name: row for row in TABLE2}
    shapes = {name: model.shape.with_sizes(seq_length=seq_length) for name, model in PAPER_MODELS.items()}
    t = tensor_parallel_size
    sizes = {way: {name: closed_form(rows[way], shape, t) for name, shape in shapes.items()} for way in LADDER}
    shares = {way: {name: 100 * size / sizes["tensor"][name] for name, size in of.items()} for way, of in sizes.items()}
    both, full = shares["tensor+sequence+selective"].values(), shares["full"].values()
    return bar_chart(
        f"s = {seq_length:,}, t = {t}: both methods leave {min(both):.1f} to {max(both):.1f}% of the baseline,<br>"
        f"full recomputation {min(full):.1f} to {max(full):.1f}%",
        shares,
        "saved, relative to tensor parallelism alone",
        "%",
        beside=True,
        fills=list(LADDER.values()),
    )
