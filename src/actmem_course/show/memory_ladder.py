"""Figure 7: what each row of table 2 leaves of the tensor-parallel baseline, for the four models."""

from __future__ import annotations

from actmem.formulas.table2 import TABLE2, closed_form
from actmem.models import PAPER_MODELS
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import BLUE, GREEN, ORANGE, SKY, VERMILION, Fill, size_text

_BASELINE = "tensor"
LADDER = {
    "tensor": Fill(VERMILION, "/"),
    "tensor+sequence": Fill(ORANGE, "x"),
    "tensor+selective": Fill(SKY, "-"),
    "tensor+sequence+selective": Fill(BLUE, "", "#FFFFFF"),
    "full": Fill(GREEN, "."),
}


def memory_ladder(seq_length: int, tensor_parallel_size: int) -> Drawing:
    """Groups of five bars, percent of the baseline.  Raises ConfigError where t cannot share a model."""
    rows = {row.name: row for row in TABLE2}
    shapes = {name: model.shape.with_sizes(seq_length=seq_length) for name, model in PAPER_MODELS.items()}
    t = tensor_parallel_size
    sizes = {c: {n: closed_form(rows[c], shape, t) for n, shape in shapes.items()} for c in LADDER}
    shares = {c: [100 * sizes[c][n] / sizes[_BASELINE][n] for n in shapes] for c in LADDER}
    both = shares["tensor+sequence+selective"]
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": list(shapes),
            "y": shares[name],
            "text": [f"{share:.1f}" if share < 40 else f"{share:.0f}" for share in shares[name]],
            "textposition": "outside",
            "textangle": 0,
            "cliponaxis": False,
            "marker": fill.marker(),
            "customdata": [f"{size_text(sizes[name][n])} a layer and rank" for n in shapes],
            "hovertemplate": f"<b>{name}</b>, %{{x}}: %{{y:.1f}}%<br>%{{customdata}}<extra></extra>",
        }
        for name, fill in LADDER.items()
    ]
    return Drawing(
        traces,
        {
            "title": {
                "text": f"s = {seq_length:,}, t = {t}: both methods leave {min(both):.1f} to {max(both):.1f}% of the baseline,<br>full recomputation {min(shares['full']):.1f} to {max(shares['full']):.1f}%"
            },
            "barmode": "group",
            "bargap": 0.2,
            "uniformtext": {"mode": "show", "minsize": 10},
            "height": 470,
            "yaxis": {
                "title": {"text": "percent of tensor parallelism alone"},
                "range": [0, max(112, 1.1 * max(map(max, shares.values())))],
                "ticksuffix": "%",
            },
            "xaxis": {"tickfont": {"size": 15}},
        },
        f"Grouped bars at s={seq_length}, t={t}, percent of tensor parallelism alone: "
        + "; ".join(
            f"{name} " + ", ".join(f"{n} {share:.1f}" for n, share in zip(shapes, shares[name])) for name in LADDER
        )
        + ".",
    )
