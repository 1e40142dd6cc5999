"""What a solved lab measures of the learner's functions, in a few lines of text."""

from __future__ import annotations

from collections.abc import Iterator

from actmem.config import PAPER_MODELS, ModelShape
from actmem.formulas.activations import TABLE2
from actmem_course.judge.case import CaseRun
from actmem_course.judge.cases.lab1_count_bytes import measured
from actmem_course.judge.cases.lab5_pipeline import on_paper
from actmem_course.judge.cases.lab8_plan import asked, judged_plan
from actmem_course.judge.observations import SavedForBackward
from actmem_course.judge.outline import Lab, solution_module
from actmem_course.judge.solutions.lab8_plan import JOBS
from actmem_course.judge.workbench import Bench
from actmem_course.others.timeline import bubble_of, draw, timeline
from actmem_course.standard_library import standard_library
from actmem_tools.verify import verify_plan

#: Of lab 6's training, in each mode.
NUM_STEPS = 8


def reward_lines(lab: Lab, b: Bench) -> list[str]:
    """What is measured once all exercises have passed; called on every rank."""
    of_labs = {
        "lab1_count_bytes": _predicted_bytes,
        "lab5_pipeline": _schedule,
        "lab6_train": _losses,
        "lab8_plan": _plan,
    }
    return list(of_labs[lab.name](b) if lab.name in of_labs else _saved_bytes(lab, b))


def _predicted_bytes(b: Bench) -> Iterator[str]:
    shape = PAPER_MODELS["175B"].shape
    heads, micro_batch, h, s = shape.letters()
    yield "One layer of GPT-3 on one of 8 ranks, as you predict it and as a real layer saves it:"
    for mode in TABLE2:
        case = mode.parallel(8).tensor_parallel_size, mode.sequence_parallel, mode.recompute
        predicted, counted = b["rank_bytes"](s, micro_batch, h, heads, *case), sum(measured(shape, *case).values())
        yield f"  {mode.name}: {predicted:,} B predicted, {counted:,} B saved"


def _schedule(b: Bench) -> Iterator[str]:
    spans = timeline(on_paper(b, 4, 4))
    yield f"Your 1F1B on 4 ranks, 4 microbatches: idle over working time {bubble_of(spans)}"
    yield draw(spans)


def _losses(b: Bench) -> Iterator[str]:
    heads = 2 * max(4, b.size)
    shape, text = (
        ModelShape(128, 2, 16 * heads, heads, num_layers=2, vocab_size=256),
        standard_library(200_000, b.device),
    )
    yield f"A GPT of {shape.num_layers} layers on {b.size} ranks, {NUM_STEPS} steps in each mode:"
    for mode in TABLE2:
        b.progress(f"mode {mode.name}")
        losses = b["train"](shape, mode, text, NUM_STEPS, b.group, device=b.device)
        yield f"  {mode.name}: loss {losses[0]:.3f} → {losses[-1]:.3f}"


def _plan(b: Bench) -> Iterator[str]:
    job = next(iter(JOBS))
    b.progress("one emulated rank runs your plan")
    lines = verify_plan(asked(job)[0], judged_plan(job, b["plan_of"](job))).matches
    predicted, counted = (sum(getattr(line, side) or 0 for line in lines) for side in ("predicted", "measured"))
    yield f"Your plan of the {job} model on one emulated rank: {predicted:,} B on the bill, {counted:,} B counted"


def _saved_bytes(lab: Lab, b: Bench) -> Iterator[str]:
    yield f"What your functions save for backward on rank {b.rank} of {b.size}:"
    for exercise in lab.exercises:
        yours, ours = CaseRun(b), CaseRun(b.with_functions(vars(solution_module(lab.name))))
        for run in (yours, ours):
            exercise.check(run)
        for name, seen in ours.seen.items():
            if isinstance(seen, SavedForBackward):
                sizes = f"{yours.seen[name].value.bytes:,} B (ours {seen.value.bytes:,} B)"
                yield f"  {exercise.number} {exercise.function}: {sizes}"
