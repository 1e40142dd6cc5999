"""Chapter 1: what fills a GPU, what each method takes off it, and where attention overtakes the rest."""

from dataclasses import replace

from actmem.config import PAPER_MODELS, PaperModel
from actmem.formulas.activations import TABLE2
from actmem.formulas.stages import stage_rows
from actmem.formulas.states import state_rows
from actmem.rows import by_term, paper_rows, total
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.marks import Drawing
from actmem_course.figures.style import FILLS
from actmem_course.figures.units import GIB, size_text
from actmem_course.others.paper import A100_BYTES

#: Rows of table 2 that a GPU of a parallel run can have, by their names in a control.
METHODS = {row.name: row for row in TABLE2 if row.tensor_parallel}
BASELINE_METHOD = "tensor"
#: Segments of a bar.  Freed: what the method saves over tensor parallelism alone.
PART_FILLS = {
    "parameters": FILLS["weights"],
    "gradients and optimizer": FILLS["gradients"],
    "activations": FILLS["activations"],
    "freed by the method": FILLS["freed"],
}
PARTS_OF_GPU = tuple(PART_FILLS)[:3]


def gpu_bytes(model: PaperModel, method: str = BASELINE_METHOD) -> dict[str, int]:
    """Predict the bytes that one GPU of the first pipeline stage holds; this stage is the fullest.

    Weights, gradients and optimizer states are those of mixed-precision Adam with float32 gradients.

    Args:
        model: A model of the paper, from PAPER_MODELS.
        method: A row of the paper's table 2 by its name, a key of METHODS such as "tensor+sequence".

    Returns: the bytes of "parameters", "gradients and optimizer" and "activations".
    """
    row = METHODS[method]
    parallel = replace(model.parallel, sequence_parallel=row.sequence_parallel)
    states = by_term(state_rows(model.shape, parallel))
    activations = total(paper_rows(stage_rows(model.shape, parallel, recompute=row.recompute)))
    return dict(zip(PARTS_OF_GPU, (states.pop("parameters"), sum(states.values()), activations)))


def memory_wall(method: str = BASELINE_METHOD, with_activations: bool = True) -> Drawing:
    """Draw figure 1 of the paper: a bar for each model's fullest GPU, against an A100's memory.

    Args:
        method: A row of the paper's table 2 by its name, a key of METHODS such as "tensor+sequence".
        with_activations: False leaves the activations out, to show what a count of parameters alone would predict.
    """
    held = {name: gpu_bytes(model, method) for name, model in PAPER_MODELS.items()}
    before = {name: sum(gpu_bytes(model).values()) for name, model in PAPER_MODELS.items()}
    now = {name: sum(parts.values()) for name, parts in held.items()}
    for name, parts in held.items():
        parts["freed by the method"] = before[name] - now[name]
        if not with_activations:
            now[name] -= parts.pop("activations")
    fit = [name for name, size in now.items() if size <= A100_BYTES]
    shown = [part for part in PART_FILLS if any(parts.get(part) for parts in held.values())]
    some = f"of the four models only {', '.join(fit)} fits"
    verdict = {0: "none of the four models fits", len(held): "all four models fit"}.get(len(fit), some)
    row = METHODS[method]
    words = "Tensor and sequence parallelism" if row.sequence_parallel else "Tensor parallelism"
    words += (
        " alone" if method == BASELINE_METHOD else f", {row.recompute} recomputation" if row.recompute != "none" else ""
    )
    drawing = bar_chart(
        f"{words if with_activations else 'Activations left out'}:<br>{verdict} in {A100_BYTES // GIB} GiB",
        {part: {name: parts[part] for name, parts in held.items()} for part in shown},
        "one GPU of the first stage",
        fills=[PART_FILLS[part] for part in shown],
        notes={
            name: f"{size_text(before[name])} → " * bool(held[name]["freed by the method"]) + size_text(size)
            for name, size in now.items()
        },
        room_for=A100_BYTES,
        limit=("one A100", A100_BYTES),
    )
    return drawing if with_activations else replace(drawing, axis=None)  # no mark where the bars ended without them
