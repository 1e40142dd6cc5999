"""Figures 1, 7 and 9 of the paper as entries: first stages and pipeline ranks, formula and emulated rank."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from actmem import paper
from actmem.formulas.model import bytes_by_rank, stage_output_rows
from actmem.formulas.pipeline import eq5, eq6, interleave_factor, section43_extras
from actmem.formulas.states import ADAM, state_rows
from actmem.formulas.table2 import TABLE2, closed_form
from actmem.lab.paper.entries import Entry
from actmem.lab.paper.jobs import Job, Results
from actmem.lab.paper.memory import STAGE_CONFIGURATIONS, Stage, measure
from actmem.lab.paper.tables import parameters_job
from actmem.models import PAPER_MODELS
from actmem.rows import compare, total

BASELINE, BOTH = "tensor", "tensor+sequence+selective"

#: Figure 1 prints no optimizer; this is Megatron's, 18 bytes a parameter.
_ADAM = "float32 gradients"

#: What section 6.1 says of figure 7, in percent of the baseline.
_FIGURE7_PRINTED = {BOTH: paper.FIGURE7_BOTH_PERCENT_BELOW, "full": paper.FIGURE7_FULL_PERCENT}


def stage_job(stage: Stage) -> Job:
    """The job whose result is the rows that the rank keeps."""
    rank = "first stage" if not stage.pipeline_rank else f"rank {stage.pipeline_rank}"
    return Job(measure, (stage,), f"{stage.model_name}, {rank}, {stage.configuration_name}")


def _stage_entry(section: str, quantity: str, stage: Stage, results: Results, **more) -> Entry:
    predicted, extra, measured = stage.rows(), stage.extra_rows(), results[stage_job(stage)]
    comparison = compare(predicted + extra, measured)
    return Entry(
        section, stage.model_name, quantity, "bytes",
        ours_formula=total(predicted), extra=total(extra), measured=total(measured),
        disagreement="" if comparison.exact else comparison.describe(), **more,
    )


def figure1_jobs(models: Sequence[str]) -> list[Job]:
    stages = [stage_job(Stage(name, configuration)) for name in models for configuration in (BASELINE, BOTH)]
    return [*(parameters_job(name) for name in models), *stages]


def figure1(models: Sequence[str], results: Results) -> list[Entry]:
    """Everything on a GPU of the first stage: states, activations before and after, the two sums."""
    entries = []
    for name in models:
        model, (_, counted) = PAPER_MODELS[name], results[parameters_job(name)]
        each = sum(state.bytes_per_parameter for state in ADAM[_ADAM])
        states = Entry(
            "figure1", name, "parameters, optimizer", "bytes",
            ours_formula=total(state_rows(model.shape, model.parallel, adam=_ADAM)), measured=each * counted,
        )
        entries.append(states)
        for configuration, label in ((BASELINE, "baseline"), (BOTH, "both methods")):
            activations = _stage_entry("figure1", f"activations, {label}", Stage(name, configuration), results)
            together = states.ours_formula + activations.ours_formula
            fits = "fits" if together <= paper.A100_BYTES else "does not fit"
            entries += [
                activations,
                Entry(
                    "figure1", name, f"all, {label}", "bytes",
                    ours_formula=together, extra=activations.extra, measured=states.measured + activations.measured,
                    disagreement=activations.disagreement, note=f"{together / 2**30:.1f} GiB, {fits}",
                ),
            ]
    return entries


def figure7_jobs(models: Sequence[str]) -> list[Job]:
    return [stage_job(Stage(name, configuration)) for name in models for configuration in STAGE_CONFIGURATIONS]


def figure7(models: Sequence[str], results: Results) -> list[Entry]:
    """First-stage bytes in five configurations, then each in percent of the tensor-parallel one."""
    entries = []
    for name in models:
        entries += [_first_stage(Stage(name, configuration), results) for configuration in STAGE_CONFIGURATIONS]
        for configuration in TABLE2:
            if configuration.tensor_parallel and configuration.name != BASELINE:
                entries += _shares(name, configuration.name, results)
    return entries


def _first_stage(stage: Stage, results: Results) -> Entry:
    """paper: equation 5 or 6 with the interleave factor and section 4.3's extras, exactly as printed."""
    parallel, shape = stage.parallel, stage.model.shape
    t, p, m = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.num_model_chunks
    equation = {"tensor+sequence": ("eq. 5", eq5), BOTH: ("eq. 6", eq6)}.get(stage.configuration_name)
    if equation is None:
        return _stage_entry("figure7", stage.configuration_name, stage, results)
    label, layers = equation
    factor = interleave_factor(p, m)
    printed = layers(shape, t) * factor + section43_extras(shape, t, p)  # whole, as p·m divides L
    by = f"{label} × {float(factor):.3f} + §4.3" if m > 1 else f"{label} + §4.3"
    return _stage_entry("figure7", stage.configuration_name, stage, results, paper=int(printed), note=by)


def _shares(name: str, configuration: str, results: Results) -> list[Entry]:
    printed = _FIGURE7_PRINTED.get(configuration)
    rows = {row.name: row for row in TABLE2}
    shape, t = PAPER_MODELS[name].shape, PAPER_MODELS[name].parallel.tensor_parallel_size
    layer = Fraction(closed_form(rows[configuration], shape, t), closed_form(rows[BASELINE], shape, t))
    this, base = Stage(name, configuration), Stage(name, BASELINE)
    stage = Fraction(total(this.rows()), total(base.rows()))
    counted = Fraction(_paper_bytes(this, results), _paper_bytes(base, results))
    return [
        Entry("figure7", name, f"{configuration}, one layer", "%", printed, 100 * layer),
        Entry("figure7", name, f"{configuration}, first stage", "%", printed, 100 * stage, measured=100 * counted),
    ]


def _paper_bytes(stage: Stage, results: Results) -> int:
    """Measured bytes beside those that the paper leaves out."""
    return total(results[stage_job(stage)]) - total(stage.extra_rows())


def figure9_models(models: Sequence[str]) -> list[str]:
    """Figure 9 is about pipeline ranks: of the 530B model, or of those asked for that have any."""
    piped = [name for name in models if PAPER_MODELS[name].parallel.pipeline_parallel_size > 1]
    return ["530B"] if "530B" in piped else piped


def _measured_ranks(name: str) -> list[int]:
    """The embedding's rank, an inner one, and the output layer's; the ranks between differ by a constant."""
    return [0, 1, PAPER_MODELS[name].parallel.pipeline_parallel_size - 1]


def figure9_jobs(models: Sequence[str]) -> list[Job]:
    return [stage_job(Stage(name, BOTH, rank)) for name in figure9_models(models) for rank in _measured_ranks(name)]


def figure9(models: Sequence[str], results: Results) -> list[Entry]:
    """Bytes on every pipeline rank with both methods, and what outputs would add that are not freed."""
    entries = []
    for name in figure9_models(models):
        first = Stage(name, BOTH)
        shape, parallel, n = first.model.shape, first.parallel, first.num_microbatches
        for rank, size in enumerate(bytes_by_rank(shape, parallel, "selective", n)):
            if rank in _measured_ranks(name):
                entries.append(_stage_entry("figure9", f"rank {rank}", Stage(name, BOTH, rank), results, pipeline_rank=rank))
            else:
                entries.append(Entry("figure9", name, f"rank {rank}", "bytes", ours_formula=size, pipeline_rank=rank))
            freed = total(stage_output_rows(shape, parallel, rank, n))
            entries.append(Entry("figure9", name, f"outputs of rank {rank}", "bytes", ours_formula=freed, pipeline_rank=rank))
        saved = Fraction(total(stage_output_rows(shape, parallel, 0, n)), 2**30)
        printed = paper.FIGURE9_SAVED_GB if name == "530B" else None
        entries.append(Entry("figure9", name, "outputs freed on rank 0", "GiB", printed, saved, pipeline_rank=0))
    return entries
