"""Chapter 7: what the paper's methods gain in time, and the roofline that says where a layer's time goes."""

from __future__ import annotations

from collections.abc import Sequence

from actmem.config import ModelShape, Parallel
from actmem.formulas.flops import (
    A100_BYTES_PER_SECOND,
    A100_FLOPS_PER_SECOND,
    Operation,
    forward_operations,
    least_seconds,
)
from actmem.models import PAPER_MODELS
from actmem_course.others import paper
from actmem_course.others.table5 import table5
from actmem_course.show.marks import STACKED, Axis, Drawing, bars, chart, downwards, line, points, scale, words
from actmem_course.show.style import BLUE, CARD, INK, ORANGE, VERMILION, YELLOW, Fill, axis_end, size_text, three_digits

_PASSES = {"forward": Fill(BLUE, "", CARD), "backward, with what it runs again": Fill(ORANGE, "/")}
#: Pairs of bars: with full recomputation, and with the paper's.
_PAIR = {"full recomputation": Fill(VERMILION, "/"), "both methods of the paper": Fill(BLUE, "", CARD)}
SECONDS_A_DAY = 86_400
_A100 = (A100_FLOPS_PER_SECOND, A100_BYTES_PER_SECOND)
#: Kinds of operation: name, colour and marker of a point, fill of a bar.
_KINDS = (
    ("attention core", VERMILION, "diamond", Fill(VERMILION, "/")),
    ("linear", BLUE, "circle", Fill(BLUE, "", CARD)),
    ("all else", YELLOW, "square", Fill(YELLOW, ".")),
)
_LEFT, _RIGHT = 0.2, 12_000.0


def table4_bars(count: int = len(paper.TABLE4)) -> Drawing:
    """The first ``count`` rows of the paper's table 4: milliseconds of one layer of the 22B model on 8 GPUs."""
    rows = dict(list(paper.TABLE4.items())[:count])
    ends = [row.combined_ms for row in rows.values()]
    longer = {name: 100 * (row.combined_ms / ends[0] - 1) for name, row in rows.items()}
    finding = f"One layer takes {ends[0]} ms"
    if count == len(paper.TABLE4):
        full, both = longer["full recompute"], longer["selective + sequence parallel"]
        finding = f"Recomputing everything makes a layer {full:.0f}% slower,<br>both methods of the paper {both:.0f}%"
    times = ([row.forward_ms for row in rows.values()], [row.backward_ms for row in rows.values()])
    passes = [
        bars(name, rows, values, fill, f"<b>%{{y}}</b>, {name}: %{{x}} ms", list(map(str, values)))
        for (name, fill), values in zip(_PASSES.items(), times)
    ]
    percents = [f" {percent:+.0f}%" if percent else " 0" for percent in longer.values()]
    return chart(
        finding,
        [*passes, words(ends, rows, percents, position="middle right")],
        "Stacked bars of forward and backward in milliseconds: "
        + "; ".join(f"{name} {row.forward_ms} and {row.backward_ms}, {longer[name]:+.1f}%" for name, row in rows.items())
        + ".",
        bargap=0.3,
        height=400,
        xaxis=scale("one layer of the 22B model on 8 GPUs, milliseconds", 0, 1.15 * max(row.combined_ms for row in paper.TABLE4.values())),
        yaxis=downwards(paper.TABLE4),
        **STACKED,
    )  # fmt: skip


def utilisation_bars() -> Drawing:
    """Table 5: MFU of the four models with full recomputation, which the paper leaves out, and with both methods."""
    rows = table5()
    full, both = ([getattr(row, f"{which}mfu_percent") for row in rows] for which in ("full_recompute_", ""))
    gained = [after - before for before, after in zip(full, both)]
    return chart(
        f"Not recomputing everything lifts the share of useful FLOPs<br>by {min(gained):.1f} to {max(gained):.1f} points",
        _pairs([row.model for row in rows], full, both, "%", 1),
        "Grouped bars of MFU in percent, full recomputation then both methods: "
        + ", ".join(f"{row.model} {x:.1f} and {y:.1f}" for row, x, y in zip(rows, full, both))
        + ".",
        barmode="group",
        yaxis=scale("MFU", 0, 68, ticksuffix="%"),
        height=420,
    )


def training_days(model_name: str, billion_tokens: int) -> tuple[float, float]:
    """Days on table 3's devices: with full recomputation and with both methods, at table 5's times."""
    model, time = PAPER_MODELS[model_name], paper.TABLE5[model_name]
    iterations = billion_tokens * 10**9 / (model.global_batch_size * model.shape.seq_length)
    return iterations * time.full_recompute_seconds / SECONDS_A_DAY, iterations * time.seconds / SECONDS_A_DAY


def days_bars(billion_tokens: int) -> Drawing:
    """Days of training for the four models, each on its own number of GPUs."""
    days = {name: training_days(name, billion_tokens) for name in PAPER_MODELS}
    names = [f"{name}<br>{model.num_devices} GPUs" for name, model in PAPER_MODELS.items()]
    full, both = map(list, zip(*days.values()))
    saved = {name: before - after for name, (before, after) in days.items()}
    most = max(saved, key=lambda name: saved[name])
    return chart(
        f"{billion_tokens:,} billion tokens: the {most} model is done {saved[most]:,.0f} days earlier,<br>"
        f"{days[most][1]:,.0f} instead of {days[most][0]:,.0f}",
        _pairs(names, full, both, "", 0),
        f"Grouped bars of days for {billion_tokens} billion tokens, full recomputation then both methods: "
        + ", ".join(f"{name} {before:,.0f} and {after:,.0f}" for name, (before, after) in days.items())
        + ".",
        Axis("days", axis_end(1.12 * max(full)), along="y"),
        barmode="group",
        yaxis={"tickformat": ",d"},
        height=440,
    )


def _pairs(names: list[str], full: list[float], both: list[float], unit: str, decimals: int) -> list[dict]:
    return [
        bars(
            name, names, values, fill, f"<b>{name}</b>, %{{x}}: %{{y:,.1f}}{unit}",
            [f"{value:,.{decimals}f}{unit}" for value in values], "outside", "y", outsidetextfont={"color": INK},
        )
        for (name, fill), values in zip(_PAIR.items(), (full, both))
    ]  # fmt: skip


def roofline(shape: ModelShape, parallel: Parallel) -> Drawing:
    """FLOPs a second that each operation can reach at most, over its FLOPs per byte; both logarithmic.

    The slope is the memory's bandwidth, the flat part the highest rate of matrix products.
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
                    name, [float(o.intensity) for o in group], [o.flops / float(o.least_seconds(*_A100)) / 1e12 for o in group],
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


def least_times(shape: ModelShape, parallel: Parallel) -> Drawing:
    """The same operations as bars of the least time on an A100, in order of the forward pass."""
    operations = forward_operations(shape, parallel)
    whole = least_seconds(operations, *_A100)
    core = [o for o in operations if o.core]
    time_share = float(least_seconds(core, *_A100) / whole)
    flop_share = sum(o.flops for o in core if o.product) / sum(o.flops for o in operations if o.product)
    times = {o.name: 1000 * float(o.least_seconds(*_A100)) for o in operations}
    return chart(
        f"The attention core has {flop_share:.0%} of the products' FLOPs<br>and {time_share:.0%} of the forward pass's least time",
        [
            bars(
                name, [o.name for o in group], [times[o.name] for o in group], fill, "<b>%{y}</b>: %{x:.3f} ms<br>%{customdata}",
                [three_digits(times[o.name]) for o in group], "outside", customdata=list(map(_bound, group)),
            )
            for (name, _, _, fill), group in zip(_KINDS, _grouped(operations))
        ],
        f"Bars of least time at {_sizes(shape, parallel)}: the forward pass takes at least {1000 * float(whole):.3f} ms, of which the "
        f"attention core {time_share:.1%} with {flop_share:.1%} of the products' FLOPs.",
        Axis("least time on one A100, milliseconds", axis_end(1.12 * max(times.values()))),
        yaxis=downwards(o.name for o in operations),
        barmode="overlay",
        height=520,
        bargap=0.2,
    )  # fmt: skip


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
