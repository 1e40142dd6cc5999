"""Chapter 1: what fills a GPU, what each method takes off it, and where attention overtakes the rest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from actmem.config import PAPER_MODELS, ModelShape, PaperModel
from actmem.formulas.activations import CORE_ATTENTION_TERMS, TABLE2, crossover_seq_length, layer_rows
from actmem.formulas.first_stage import stage_rows
from actmem.formulas.states import state_rows
from actmem.rows import by_term, paper_rows, total
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.marks import Drawing, chart, line, log_scale, points, scale
from actmem_course.figures.style import FILLS, HELD, INK, VERMILION
from actmem_course.figures.units import GIB, exact_text, size_text, three_digits
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
#: Sequence lengths of the crossover's horizontal axis, in tokens.
LENGTHS = tuple(2**power for power in range(7, 16))


def gpu_bytes(model: PaperModel, method: str = BASELINE_METHOD) -> dict[str, int]:
    """Bytes by part on one GPU of the first stage, which holds most; states of mixed-precision Adam with float32
    gradients.

    method: a name of METHODS.
    """
    row = METHODS[method]
    parallel = replace(model.parallel, sequence_parallel=row.sequence_parallel)
    states = by_term(state_rows(model.shape, parallel))
    activations = total(paper_rows(stage_rows(model.shape, parallel, recompute=row.recompute)))
    return dict(zip(PARTS_OF_GPU, (states.pop("parameters"), sum(states.values()), activations)))


def memory_wall(method: str = BASELINE_METHOD, with_activations: bool = True) -> Drawing:
    """Figure 1 of the paper: a bar for each model's fullest GPU, against an A100's memory.

    with_activations: False leaves them out, as somebody does who counts parameters only.
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
        notes={name: f"holds {size_text(size)}" for name, size in now.items()},
        room_for=A100_BYTES,
        limit=("one A100", A100_BYTES),
    )
    return drawing if with_activations else replace(drawing, axis=None)  # no mark where the bars ended without them


def crossover_lines(shape: ModelShape) -> Drawing:
    """Bytes of the core attention and of the rest of one layer for s from 128 to 32768, 16 bits.

    Both axes are logarithmic: the core rises twice as steeply.  The crossover is at
    s = 34h/(5a); the markers are at the shape's own s.
    """
    a, b, h, s = shape.letters()
    cross = crossover_seq_length(h, a)
    core, rest = _core_and_rest(shape)
    ahead, behind = ("the core attention", "all the rest") if core >= rest else ("all the rest", "the core attention")
    times = three_digits(max(core / rest, rest / core))
    parts = [_core_and_rest(shape.with_sizes(seq_length=length)) for length in LENGTHS]
    cores, rests = zip(*parts)

    def along(draw, name: str, at: tuple[int, ...], sizes: tuple[int, ...], *look: str, **more: Any) -> dict:
        hover = f"<b>{name}</b><br>s = %{{x:,}}: %{{customdata}}"
        said = [exact_text(size) for size in sizes]
        return draw(name, at, [size / GIB for size in sizes], look[0], hover, look[1], customdata=said, **more)

    ends = [min(map(min, parts)) / GIB, max(map(max, parts)) / GIB]
    return chart(
        f"At s = {s:,} {ahead} holds {times} times {behind};<br>they are equal at s = {cross:,.0f}",
        [
            along(line, "all the rest, 34sbh", LENGTHS, rests, HELD, "solid"),
            along(line, "core attention, 5as²b", LENGTHS, cores, VERMILION, "dash"),
            along(points, "the rest at this s", (s,), (rest,), HELD, "circle", showlegend=False),
            along(points, "the core at this s", (s,), (core,), VERMILION, "diamond", showlegend=False),
            line(
                f"crossover, s = 34h/(5a) = {cross:,.0f}", [cross, cross], ends, INK, "s = 34h/(5a) = %{x:,.1f} tokens",
                "dot", 1.5,
            ),
        ],
        f"Lines over s at b={b}, h={h}, a={a}: the core's 5as²b rises twice as steeply as the rest's 34sbh "
        "and crosses it "
        f"at s = 34h/(5a) = {cross:,.1f} tokens; at s = {s} the core holds {size_text(core)}, the rest "
        f"{size_text(rest)}.",
        xaxis=log_scale("sequence length s, tokens", LENGTHS[::2], map("{:,}".format, LENGTHS[::2]), range=[2.05, 4.6]),
        yaxis={"type": "log", "dtick": 1, "exponentformat": "none", **scale("one layer, GiB")},
    )  # fmt: skip


def _core_and_rest(shape: ModelShape) -> tuple[int, int]:
    rows = layer_rows(shape)
    core = sum(row.bytes for row in rows if row.term in CORE_ATTENTION_TERMS)
    return core, total(rows) - core
