"""What fills one GPU of the first pipeline stage: figure 1 of the paper, for the four models."""

from __future__ import annotations

from dataclasses import replace

from actmem.config import ModelShape, Parallel
from actmem.formulas.stage_terms import stage_rows
from actmem.formulas.states import state_rows
from actmem.formulas.table2 import TABLE2, Configuration
from actmem.models import PAPER_MODELS, PaperModel
from actmem.rows import by_term, total
from actmem_course.others.paper import A100_BYTES
from actmem_course.show.drawing import Drawing
from actmem_course.show.style import GIB, GREEN, INK, SKY, VERMILION, Fill, size_text

#: Rows of table 2 that a GPU of a parallel run can have, by their names in a control.
METHODS: dict[str, Configuration] = {row.name: row for row in TABLE2 if row.tensor_parallel}
BASELINE_METHOD = "tensor"

_TITLES = {
    "tensor": "Tensor parallelism alone",
    "tensor+sequence": "Tensor and sequence parallelism",
    "tensor+selective": "Tensor parallelism, selective recomputation",
    "tensor+sequence+selective": "Tensor and sequence parallelism, selective recomputation",
    "full": "Tensor parallelism, full recomputation",
}

#: Segments of a bar.  Freed: what the method saves over tensor parallelism alone.
PART_FILLS = {
    "parameters": Fill(GREEN, ""),
    "gradients and optimizer": Fill(SKY, "-"),
    "activations": Fill(VERMILION, "/"),
    "freed by the method": Fill("#FFFFFF", "."),
}


def gpu_bytes(model: PaperModel, method: str) -> dict[str, int]:
    """Bytes on one GPU of the model's first stage, which holds most: states, and activations by ``method``.

    method: a key of METHODS.  States are those of mixed-precision Adam with float32 gradients.
    """
    configuration = METHODS[method]
    return stage_parts(
        model.shape, replace(model.parallel, sequence_parallel=configuration.sequence_parallel), configuration.recompute
    )


def stage_parts(shape: ModelShape, parallel: Parallel, recompute: str) -> dict[str, int]:
    """Bytes of parameters, of gradients and optimizer, and of activations on one rank of the first stage."""
    states = by_term(state_rows(shape, parallel))
    parameters = states.pop("parameters")
    activations = total(stage_rows(shape, parallel, recompute=recompute))
    return {"parameters": parameters, "gradients and optimizer": sum(states.values()), "activations": activations}


def memory_wall(method: str = BASELINE_METHOD) -> Drawing:
    """Four bars, one for each model's fullest GPU, against the 80 GB of an A100."""
    held = {name: gpu_bytes(model, method) for name, model in PAPER_MODELS.items()}
    before = {name: sum(gpu_bytes(model, BASELINE_METHOD).values()) for name, model in PAPER_MODELS.items()}
    for name, parts in held.items():
        parts["freed by the method"] = before[name] - sum(parts.values())
    now = {name: before[name] - parts["freed by the method"] for name, parts in held.items()}
    fit = [name for name, size in now.items() if size <= A100_BYTES]
    shown = [part for part in PART_FILLS if any(parts[part] for parts in held.values())]
    traces = [_segments(part, {name: parts[part] for name, parts in held.items()}) for part in shown]
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": f"one A100, {A100_BYTES / GIB:.0f} GiB",
            "x": [A100_BYTES / GIB] * 2,
            "y": [-0.6, len(held) - 0.4],
            "yaxis": "y2",
            "line": {"color": INK, "width": 2.5, "dash": "dash"},
            "hovertemplate": "memory of one A100: %{x:.0f} GiB<extra></extra>",
        }
    )
    verdict = {0: "none of the four models fits", len(held): "all four models fit"}.get(
        len(fit), f"of the four models only {', '.join(fit)} fits"
    )
    title = f"{title_of(method)}:<br>{verdict} in {A100_BYTES / GIB:.0f} GiB"
    sizes = "; ".join(
        f"{name} {size_text(now[name])}, of it activations {size_text(held[name]['activations'])}" for name in held
    )
    return Drawing(
        traces,
        {
            "title": {"text": title},
            "barmode": "stack",
            "bargap": 0.35,
            "xaxis": {
                "title": {"text": "memory of one GPU of the first stage, GiB"},
                "range": [0, 1.04 * max(before.values()) / GIB],
            },
            "yaxis": {"autorange": "reversed", "tickfont": {"size": 15}},
            # The line runs past the first and the last bar, where a category axis ends.
            "yaxis2": {"overlaying": "y", "visible": False, "range": [-0.6, len(held) - 0.4], "fixedrange": True},
            "legend": {"traceorder": "normal"},
        },
        f"Stacked bars, one GPU of each model's first stage. {title_of(method)}: {verdict} in {size_text(A100_BYTES)}. {sizes}.",
    )


def title_of(method: str) -> str:
    """A method of table 2 in words."""
    return _TITLES[method]


def _segments(part: str, sizes: dict[str, int]) -> dict:
    fill = PART_FILLS[part]
    return {
        "type": "bar",
        "orientation": "h",
        "name": part,
        "x": [size / GIB for size in sizes.values()],
        "y": list(sizes),
        "marker": fill.marker(),
        "customdata": [f"{size:,} B = {size_text(size)}" for size in sizes.values()],
        "hovertemplate": f"<b>%{{y}}</b>, {part}<br>%{{customdata}}<extra></extra>",
    }
