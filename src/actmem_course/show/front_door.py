"""The memory wall with switches: what each method takes off one GPU, for the paper's four models."""

from __future__ import annotations

from dataclasses import replace

from actmem.models import PAPER_MODELS, PaperModel
from actmem_course.others.paper import A100_BYTES
from actmem_course.show.choices import Control, choice, switch
from actmem_course.show.drawing import Drawing
from actmem_course.show.memory_wall import PART_FILLS, stage_parts
from actmem_course.show.style import CARD, GIB, INK, size_text

#: Of the vertical axis, in bytes.  Bars that go on beyond it are cut off, and say so.
TOP_BYTES = 5 * A100_BYTES // 2
PARTS_OF_GPU = ("parameters", "gradients and optimizer", "activations")


def one_gpu(model: PaperModel, tensor: bool, sequence: bool, selective: bool, full: bool) -> dict[str, int]:
    """Bytes by part on one GPU of the first stage.  Full recomputation includes what selective recomputes.

    Without tensor parallelism a layer is on one GPU, and there is nothing to cut along the sequence.
    """
    t = model.parallel.tensor_parallel_size if tensor else 1
    parallel = replace(model.parallel, tensor_parallel_size=t, sequence_parallel=sequence and tensor)
    return stage_parts(model.shape, parallel, "full" if full else "selective" if selective else "none")


def front_door(model: str, tensor: bool, sequence: bool, selective: bool, full: bool) -> Drawing:
    """A bar for each model's fullest GPU against the 80 GiB of an A100; ``model`` is the one in the title."""
    held = {name: one_gpu(one, tensor, sequence, selective, full) for name, one in PAPER_MODELS.items()}
    sums = {name: sum(parts.values()) for name, parts in held.items()}
    over = sums[model] - A100_BYTES
    verdict = f"{size_text(over)} too much" if over > 0 else "it fits"
    on = [name for name, pressed in _names(tensor, sequence, selective, full) if pressed] or ["nothing switched on"]
    traces = [_part(part, held, model) for part in PARTS_OF_GPU]
    traces.append(_sums(sums))
    said = "; ".join(f"{name} {size_text(size)}{'' if size > A100_BYTES else ', fits'}" for name, size in sums.items())
    return Drawing(
        traces,
        {
            "title": {"text": f"{model}: {size_text(sums[model])} on one GPU of {size_text(A100_BYTES)},<br>{verdict}"},
            "barmode": "stack",
            "bargap": 0.3,
            "height": 440,
            "xaxis": {"tickfont": {"size": 15}, "categoryorder": "array", "categoryarray": list(sums), "range": [-0.5, len(sums) - 0.5]},
            "yaxis": {"title": {"text": "one GPU, GiB"}, "range": [0, TOP_BYTES / GIB], "dtick": 40},
            "legend": {"traceorder": "normal"},
            **_wall(),
            "margin": {"l": 60, "r": 16, "t": 76, "b": 92},
        },
        f"Stacked bars against {size_text(A100_BYTES)}, one GPU of each model, {', '.join(on)}: {said}.",
    )  # fmt: skip


def front_door_controls() -> dict[str, Control]:
    """What a reader can choose, by the names of ``front_door``'s arguments."""
    return {
        "model": choice("model", list(PAPER_MODELS), "175B"),
        "tensor": switch("tensor parallelism", True),
        "sequence": switch("sequence parallelism", False),
        "selective": switch("selective recomputation", False),
        "full": switch("full recomputation", False),
    }


def _names(tensor: bool, sequence: bool, selective: bool, full: bool) -> list[tuple[str, bool]]:
    return [
        ("tensor parallelism", tensor),
        ("sequence parallelism", sequence),
        ("selective recomputation", selective),
        ("full recomputation", full),
    ]


def _part(part: str, held: dict[str, dict[str, int]], chosen: str) -> dict:
    return {
        "type": "bar",
        "name": part,
        "x": list(held),
        "y": [parts[part] / GIB for parts in held.values()],
        "marker": {**PART_FILLS[part].marker(), "opacity": [1 if name == chosen else 0.45 for name in held]},
        "customdata": [f"{parts[part]:,} B = {size_text(parts[part])}" for parts in held.values()],
        "hovertemplate": f"<b>%{{x}}</b>, {part}<br>%{{customdata}}<extra></extra>",
    }


def _sums(sums: dict[str, int]) -> dict:
    """Each bar's size above it; at the top, with an arrow, where the bar goes on."""
    return {
        "type": "scatter",
        "mode": "text",
        "x": list(sums),
        "y": [min(size + 0.04 * TOP_BYTES, 0.95 * TOP_BYTES) / GIB for size in sums.values()],
        "text": [
            f"<b>{'↑ ' * (size > TOP_BYTES)}{size_text(size).replace(' ', '<br>' if size > TOP_BYTES else ' ')}</b>"
            for size in sums.values()
        ],
        "textfont": {"size": 14, "color": INK},
        "hoverinfo": "skip",
        "showlegend": False,
        "cliponaxis": False,
    }


def _wall() -> dict:
    """The line across the chart, for its layout: a category axis has no place for the ends of a trace."""
    across = {"xref": "paper", "yref": "y"}
    level = A100_BYTES / GIB
    line = {"color": INK, "width": 3, "dash": "dash"}
    words = f"<b>one A100: {size_text(A100_BYTES)}</b>"
    look = {"showarrow": False, "xanchor": "right", "yanchor": "bottom", "bgcolor": CARD, "font": {"size": 13}}
    return {
        "shapes": [{"type": "line", **across, "x0": 0, "x1": 1, "y0": level, "y1": level, "line": line}],
        "annotations": [{**across, "x": 1, "y": level, "text": words, **look}],
    }
