"""Table 5 as utilisation, and as the days that a training run takes."""

from __future__ import annotations

from actmem.models import PAPER_MODELS
from actmem_course.others import paper
from actmem_course.others.table5 import table5
from actmem_course.show.drawing import Axis, Drawing
from actmem_course.show.style import BLUE, CARD, INK, VERMILION, Fill, axis_end

_FULL, _BOTH = Fill(VERMILION, "/"), Fill(BLUE, "", CARD)
_NAMES = ("full recomputation", "both methods of the paper")
SECONDS_A_DAY = 86_400


def utilisation_bars() -> Drawing:
    """MFU of the four models with full recomputation, which table 5 leaves out, and with both methods."""
    rows = table5()
    gained = [row.mfu_percent - row.full_recompute_mfu_percent for row in rows]
    full = [row.full_recompute_mfu_percent for row in rows]
    both = [row.mfu_percent for row in rows]
    traces = [
        _bars(_NAMES[0], [row.model for row in rows], full, _FULL, "%", 1),
        _bars(_NAMES[1], [row.model for row in rows], both, _BOTH, "%", 1),
    ]
    return Drawing(
        traces,
        {
            "title": {
                "text": f"Not recomputing everything lifts the share of useful FLOPs<br>by {min(gained):.1f} to {max(gained):.1f} points"
            },
            "barmode": "group",
            "yaxis": {"title": {"text": "MFU"}, "range": [0, 68], "ticksuffix": "%"},
            "height": 420,
        },
        "Grouped bars of MFU in percent, full recomputation then both methods: "
        + ", ".join(f"{row.model} {x:.1f} and {y:.1f}" for row, x, y in zip(rows, full, both))
        + ".",
    )


def training_days(model_name: str, billion_tokens: int) -> tuple[float, float]:
    """Days on table 3's devices: with full recomputation and with both methods, at table 5's times."""
    model, time = PAPER_MODELS[model_name], paper.TABLE5[model_name]
    iterations = billion_tokens * 10**9 / (model.global_batch_size * model.shape.seq_length)
    return iterations * time.full_recompute_seconds / SECONDS_A_DAY, iterations * time.seconds / SECONDS_A_DAY


def days_bars(billion_tokens: int) -> Drawing:
    """Days of training for the four models, each on its own number of GPUs."""
    days = {name: training_days(name, billion_tokens) for name in PAPER_MODELS}
    labels = [f"{name}<br>{model.num_devices} GPUs" for name, model in PAPER_MODELS.items()]
    traces = [
        _bars(_NAMES[0], labels, [full for full, _ in days.values()], _FULL, "", 0),
        _bars(_NAMES[1], labels, [both for _, both in days.values()], _BOTH, "", 0),
    ]
    axis = Axis("days", axis_end(1.12 * max(full for full, _ in days.values())), along="y")
    saved = {name: full - both for name, (full, both) in days.items()}
    most = max(saved, key=lambda name: saved[name])
    return Drawing(
        traces,
        {
            "title": {
                "text": f"{billion_tokens:,} billion tokens: the {most} model is done {saved[most]:,.0f} days earlier,<br>{days[most][1]:,.0f} instead of {days[most][0]:,.0f}"
            },
            "barmode": "group",
            "yaxis": {"title": {"text": axis.title}, "range": [0, axis.end], "tickformat": ",d"},
            "height": 440,
        },
        f"Grouped bars of days for {billion_tokens} billion tokens, full recomputation then both methods: "
        + ", ".join(f"{name} {full:,.0f} and {both:,.0f}" for name, (full, both) in days.items())
        + ".",
        axis,
    )


def _bars(name: str, x: list[str], y: list[float], fill: Fill, unit: str, decimals: int) -> dict:
    return {
        "type": "bar",
        "name": name,
        "x": x,
        "y": y,
        "text": [f"{value:,.{decimals}f}{unit}" for value in y],
        "textposition": "outside",
        "textangle": 0,
        "cliponaxis": False,
        "outsidetextfont": {"color": INK},
        "marker": fill.marker(),
        "hovertemplate": f"<b>{name}</b>, %{{x}}: %{{y:,.1f}}{unit}<extra></extra>",
    }
