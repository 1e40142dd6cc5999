"""Chapter 7: what the paper's methods gain in time, and the roofline that says where a layer's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actmem.config import PAPER_MODELS, ModelShape, Parallel
from actmem.formulas.flops import (
    A100_BYTES_PER_SECOND,
    A100_FLOPS_PER_SECOND,
    Operation,
    forward_operations,
    least_seconds,
)
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.marks import Drawing, chart, line, points, scale
from actmem_course.figures.style import BLUE, COMPARED, FILLS, INK, VERMILION
from actmem_course.figures.units import size_text, three_digits
from actmem_course.others import paper

_PASSES = {"forward": FILLS["forward"], "backward, with what it recomputes": FILLS["backward"]}
#: Pairs of bars: with full recomputation, and with the paper's.
_PAIR = {"full recomputation": FILLS["others"], "both methods of the paper": FILLS["ours"]}
SECONDS_A_DAY = 86_400
_A100 = (A100_FLOPS_PER_SECOND, A100_BYTES_PER_SECOND)
#: Kinds of operation: name, colour and marker of a point, fill of a bar.
_KINDS = (
    ("attention core", VERMILION, "diamond", FILLS["softmax"]),
    ("linear", BLUE, "circle", FILLS["input of a linear"]),
    ("norms, GeLU, dropouts, sums", COMPARED, "square", FILLS["layer-norm input"]),
)
_LEFT, _RIGHT = 0.2, 12_000.0


def table4_bars(count: int = len(paper.TABLE4)) -> Drawing:
    """The first ``count`` rows of the paper's table 4: milliseconds of one layer of the 22B model on 8 GPUs."""
    rows, shown = paper.TABLE4, list(paper.TABLE4)[:count]
    first, *_ = ends = [row.combined_ms for row in rows.values()]
    longer = {name: 100 * (rows[name].combined_ms / first - 1) for name in shown}
    finding = f"One layer takes {first} ms"
    if count == len(rows):
        full, both = longer["full recompute"], longer["selective + sequence parallel"]
        finding = f"Recomputing everything makes a layer {full:.0f}% slower,<br>both methods of the paper {both:.0f}%"
    times = zip(*((row.forward_ms, row.backward_ms) if name in shown else (None, None) for name, row in rows.items()))
    return bar_chart(
        finding,
        {name: dict(zip(rows, values)) for name, values in zip(_PASSES, times)},
        "one layer of the 22B model on 8 GPUs",
        "ms",
        fills=list(_PASSES.values()),
        notes=dict.fromkeys(rows, "?")
        | {name: f"{percent:+.0f}%" if percent else f"{first} ms" for name, percent in longer.items()},
        room_for=max(ends),
    )


def utilisation_bars() -> Drawing:
    """Table 5: MFU of the four models with full recomputation, which the paper leaves out, and with both methods."""
    rows = {
        name: (paper.mfu_percent(name, time.full_recompute_seconds), paper.mfu_percent(name, time.seconds))
        for name, time in paper.TABLE5.items()
    }
    gained = [after - before for before, after in rows.values()]
    return _pairs(
        f"Not recomputing everything raises MFU<br>by {min(gained):.1f} to {max(gained):.1f} points",
        rows, "MFU", "%",
    )  # fmt: skip


def training_days(model_name: str, billion_tokens: int) -> tuple[float, float]:
    """Days on table 3's devices: with full recomputation and with both methods, at table 5's times."""
    model, time = PAPER_MODELS[model_name], paper.TABLE5[model_name]
    iterations = billion_tokens * 10**9 / (model.global_batch_size * model.shape.seq_length)
    return iterations * time.full_recompute_seconds / SECONDS_A_DAY, iterations * time.seconds / SECONDS_A_DAY


def days_bars(billion_tokens: int) -> Drawing:
    """Days of training for the four models, each on its own number of GPUs."""
    days = {name: training_days(name, billion_tokens) for name in PAPER_MODELS}
    saved = {name: before - after for name, (before, after) in days.items()}
    most = max(saved, key=lambda name: saved[name])
    return _pairs(
        f"{billion_tokens:,} billion tokens: the {most} model is done {saved[most]:,.0f} days earlier,<br>"
        f"{days[most][1]:,.0f} instead of {days[most][0]:,.0f}",
        {f"{name}, {PAPER_MODELS[name].num_devices} GPUs": pair for name, pair in days.items()}, "training", "days",
    )  # fmt: skip


def _pairs(title: str, rows: Mapping[str, tuple[float, float]], axis: str, unit: str) -> Drawing:
    parts = {part: dict(zip(rows, values)) for part, values in zip(_PAIR, zip(*rows.values()))}
    return bar_chart(title, parts, axis, unit, beside=True, fills=list(_PAIR.values()))


def roofline(shape: ModelShape, parallel: Parallel) -> Drawing:
    """FLOPs a second that each operation can reach at most, over its FLOPs per byte; both logarithmic.

    The slope is the memory's bandwidth, the flat part the highest rate of matmuls.
    """
    operations = forward_operations(shape, parallel)
    ridge = A100_FLOPS_PER_SECOND / A100_BYTES_PER_SECOND
    slow = [o for o in operations if o.bound_by_memory(*_A100)]
    core = [float(o.intensity) for o in operations if o.core]
    rates = [_LEFT * A100_BYTES_PER_SECOND / 1e12, A100_FLOPS_PER_SECOND / 1e12, A100_FLOPS_PER_SECOND / 1e12]
    device = f"A100: {A100_FLOPS_PER_SECOND / 1e12:.0f} TFLOP/s, {A100_BYTES_PER_SECOND / 1e9:,.0f} GB/s"
    log = {"type": "log", "dtick": 1, "exponentformat": "none"}
    return chart(
        f"{len(slow)} of {len(operations)} operations wait for memory; in the attention core<br>"
        f"{min(core):.1f} to {max(core):.0f} FLOPs per byte, where {ridge:.0f} fill the device",
        [
            line(device, [_LEFT, ridge, _RIGHT], rates, INK, width=2),
            *(
                points(
                    name, [float(o.intensity) for o in group], list(map(_reached, group)),
                    colour, "<b>%{customdata[0]}</b>: %{x:.1f} FLOPs per byte<br>%{customdata[1]}", symbol, 12, 1,
                    customdata=[[o.name, _bound(o)] for o in group],
                )
                for (name, colour, symbol, _), group in zip(_KINDS, _grouped(operations))
            ),
        ],
        f"Roofline at {_sizes(shape, parallel)}, FLOPs per byte: "
        + ", ".join(f"{o.name} {three_digits(float(o.intensity))}" for o in operations)
        + f"; the ridge is at {ridge:.0f}.",
        xaxis=scale("FLOPs for each byte moved", -0.7, 4.05, **log),
        yaxis=scale("TFLOP/s at most", -0.5, 2.8, **log),
        height=460,
    )  # fmt: skip


def _reached(o: Operation) -> float:
    """TFLOP a second, at most."""
    return o.flops / float(o.least_seconds(*_A100)) / 1e12


def least_times(shape: ModelShape, parallel: Parallel) -> Drawing:
    """The same operations as bars of the least time on an A100, in order of the forward pass."""
    operations = forward_operations(shape, parallel)
    core = [o for o in operations if o.core]
    time_share = float(least_seconds(core, *_A100) / least_seconds(operations, *_A100))
    flop_share = sum(o.flops for o in core if o.product) / sum(o.flops for o in operations if o.product)
    groups = {name: group for (name, *_), group in zip(_KINDS, _grouped(operations))}
    return bar_chart(
        f"The attention core has {flop_share:.0%} of the products' FLOPs<br>and {time_share:.0%} of the "
        "forward pass's least time",
        {name: {o.name: 1e6 * float(o.least_seconds(*_A100)) for o in group} for name, group in groups.items()},
        f"least time on one A100 at {_sizes(shape, parallel)}",
        "µs",
        fills=[fill for *_, fill in _KINDS],
        order=[o.name for o in operations],
        about={o.name: _bound(o) for o in operations},
    )


def _grouped(operations: Sequence[Operation]) -> list[list[Operation]]:
    """By _KINDS."""
    kind = [0 if o.core else 1 if o.product else 2 for o in operations]
    return [[o for o, own in zip(operations, kind) if own == number] for number in range(len(_KINDS))]


def _bound(o: Operation) -> str:
    bound = "memory" if o.bound_by_memory(*_A100) else "the products' rate"
    return f"{o.flops / 1e9:,.2f} GFLOP, {size_text(o.bytes)} moved; bound by {bound}"


def _sizes(shape: ModelShape, parallel: Parallel) -> str:
    a, b, h, s = shape.letters()
    return f"s={s}, b={b}, h={h}, a={a}, t={parallel.tensor_parallel_size}"
