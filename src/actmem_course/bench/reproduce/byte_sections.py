"""What the paper says about bytes, model by model, with ours: table 2, figures 1, 7 and 9."""

from __future__ import annotations

from fractions import Fraction

import torch

from actmem.formulas.activations import TABLE2, closed_form
from actmem.formulas.first_stage import eq5, eq6, interleave_factor, section43_extras
from actmem.formulas.stage_terms import bytes_by_rank, stage_output_rows
from actmem.formulas.states import ADAM, state_rows
from actmem.measure.emulate import emulated_rank
from actmem.models import PAPER_MODELS
from actmem.rows import compare, total
from actmem_course.bench.measure_table2 import measure_table2
from actmem_course.bench.reproduce.jobs import Job, Results
from actmem_course.bench.reproduce.paper_stage import STAGE_CONFIGURATIONS, PaperStage, measure_paper_stage
from actmem_course.bench.reproduce.time_sections import parameters_job
from actmem_course.others import paper
from actmem_course.ranks import Ranks
from actmem_course.results import PaperEntry, Table2Result

_BASELINE, _BOTH = "tensor", "tensor+sequence+selective"

#: Figure 1 prints no optimizer; this is Megatron's, 18 bytes a parameter.
_ADAM = "float32 gradients"

#: What section 6.1 says of figure 7, in percent of the baseline.
_FIGURE7_PRINTED = {_BOTH: paper.FIGURE7_BOTH_PERCENT_BELOW, "full": paper.FIGURE7_FULL_PERCENT}


def measure_layer_of(name: str) -> list[Table2Result]:
    """Table 2 for one layer of a paper model, on one emulated rank of its t."""
    model = PAPER_MODELS[name]
    t = model.parallel.tensor_parallel_size
    with emulated_rank(t):
        return measure_table2(model.shape, Ranks(0, t, "cpu", emulated=True), torch.bfloat16)


def table2_jobs(name: str) -> list[Job]:
    return [Job(measure_layer_of, (name,), f"{name}, table 2")]


def table2(name: str, results: Results) -> list[PaperEntry]:
    """Bytes of one layer on one rank: the row's own formula, the sum of named tensors, the ledger."""
    shape, t = PAPER_MODELS[name].shape, PAPER_MODELS[name].parallel.tensor_parallel_size
    (job,) = table2_jobs(name)
    return [
        PaperEntry(
            "table2", name, row.name, "bytes", closed_form(row, shape, t), found.predicted_bytes, found.extra_bytes,
            found.measured_bytes, found.disagreement, note=f"sbh({row.formula()})",
        )
        for row, found in zip(TABLE2, results[job])
    ]  # fmt: skip


def stage_job(stage: PaperStage) -> Job:
    """The job whose result is the rows that the rank keeps."""
    rank = f"rank {stage.pipeline_rank}" if stage.pipeline_rank else "first stage"
    return Job(measure_paper_stage, (stage,), f"{stage.model_name}, {rank}, {stage.configuration_name}")


def _stage_entry(section: str, quantity: str, stage: PaperStage, results: Results, **more) -> PaperEntry:
    predicted, extra, measured = stage.rows(), stage.extra_rows(), results[stage_job(stage)]
    comparison = compare(predicted + extra, measured)
    return PaperEntry(
        section, stage.model_name, quantity, "bytes", ours_formula=total(predicted), extra=total(extra), measured=total(measured),
        disagreement="" if comparison.exact else comparison.describe(), **more,
    )  # fmt: skip


def figure1_jobs(name: str) -> list[Job]:
    return [parameters_job(name), *(stage_job(PaperStage(name, which)) for which in (_BASELINE, _BOTH))]


def figure1(name: str, results: Results) -> list[PaperEntry]:
    """Everything on a GPU of the first stage: states, activations before and after, the two sums."""
    model, (_, counted) = PAPER_MODELS[name], results[parameters_job(name)]
    predicted = total(state_rows(model.shape, model.parallel, adam=_ADAM))
    measured = counted * sum(state.bytes_per_parameter for state in ADAM[_ADAM])
    quantity = "parameters, optimizer"
    entries = [PaperEntry("figure1", name, quantity, "bytes", ours_formula=predicted, measured=measured)]
    for configuration, label in ((_BASELINE, "baseline"), (_BOTH, "both methods")):
        stage = PaperStage(name, configuration)
        together = predicted + total(stage.rows())
        fits = "fits" if together <= paper.A100_BYTES else "does not fit"
        activations = _stage_entry("figure1", f"activations, {label}", stage, results)
        entries += [
            activations,
            PaperEntry(
                "figure1", name, f"all, {label}", "bytes", ours_formula=together, extra=activations.extra,
                measured=measured + total(results[stage_job(stage)]), disagreement=activations.disagreement,
                note=f"{together / 2**30:.1f} GiB, {fits}",
            ),
        ]  # fmt: skip
    return entries


def figure7_jobs(name: str) -> list[Job]:
    return [stage_job(PaperStage(name, configuration)) for configuration in STAGE_CONFIGURATIONS]


def figure7(name: str, results: Results) -> list[PaperEntry]:
    """First-stage bytes in five configurations, then each in percent of the tensor-parallel one."""
    entries = [_first_stage(PaperStage(name, configuration), results) for configuration in STAGE_CONFIGURATIONS]
    for configuration in STAGE_CONFIGURATIONS:
        if configuration != _BASELINE:
            entries += _shares(name, configuration, results)
    return entries


def _first_stage(stage: PaperStage, results: Results) -> PaperEntry:
    """paper: equation 5 or 6 with the interleave factor and section 4.3's extras, exactly as printed."""
    parallel, shape = stage.parallel, stage.model.shape
    t, p, m = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.num_model_chunks
    equation = {"tensor+sequence": ("eq. 5", eq5), _BOTH: ("eq. 6", eq6)}.get(stage.configuration_name)
    if equation is None:
        return _stage_entry("figure7", stage.configuration_name, stage, results)
    label, layers = equation
    factor = interleave_factor(p, m)
    printed = layers(shape, t) * factor + section43_extras(shape, t, p)  # whole, as p·m divides L
    by = f"{label} × {float(factor):.3f} + §4.3" if m > 1 else f"{label} + §4.3"
    return _stage_entry("figure7", stage.configuration_name, stage, results, paper=int(printed), note=by)


def _shares(name: str, configuration: str, results: Results) -> list[PaperEntry]:
    printed = _FIGURE7_PRINTED.get(configuration)
    rows = {row.name: row for row in TABLE2}
    shape, t = PAPER_MODELS[name].shape, PAPER_MODELS[name].parallel.tensor_parallel_size
    layer = Fraction(closed_form(rows[configuration], shape, t), closed_form(rows[_BASELINE], shape, t))
    this, base = PaperStage(name, configuration), PaperStage(name, _BASELINE)
    stage = Fraction(total(this.rows()), total(base.rows()))
    counted = Fraction(_paper_bytes(this, results), _paper_bytes(base, results))
    return [
        PaperEntry("figure7", name, f"{configuration}, one layer", "%", printed, 100 * layer),
        PaperEntry("figure7", name, f"{configuration}, first stage", "%", printed, 100 * stage, measured=100 * counted),
    ]


def _paper_bytes(stage: PaperStage, results: Results) -> int:
    """Measured bytes without those that the paper leaves out."""
    return total(results[stage_job(stage)]) - total(stage.extra_rows())


def _measured_ranks(name: str) -> list[int]:
    """The embedding's rank, an inner one, and the output layer's; the ranks between differ by a constant."""
    return [0, 1, PAPER_MODELS[name].parallel.pipeline_parallel_size - 1]


def figure9_jobs(name: str) -> list[Job]:
    return [stage_job(PaperStage(name, _BOTH, rank)) for rank in _measured_ranks(name)]


def figure9(name: str, results: Results) -> list[PaperEntry]:
    """Bytes on every pipeline rank with both methods, and what outputs would add that are not freed."""
    first, entries = PaperStage(name, _BOTH), []
    shape, parallel, n = first.model.shape, first.parallel, first.num_microbatches
    outputs = [total(stage_output_rows(shape, parallel, r, n)) for r in range(parallel.pipeline_parallel_size)]
    for rank, size in enumerate(bytes_by_rank(shape, parallel, "selective", n)):
        quantity = f"rank {rank}"
        if rank in _measured_ranks(name):
            entries.append(
                _stage_entry("figure9", quantity, PaperStage(name, _BOTH, rank), results, pipeline_rank=rank)
            )
        else:
            entries.append(PaperEntry("figure9", name, quantity, "bytes", ours_formula=size, pipeline_rank=rank))
        freed = outputs[rank]
        entries.append(
            PaperEntry("figure9", name, f"outputs of {quantity}", "bytes", ours_formula=freed, pipeline_rank=rank)
        )
    printed = paper.FIGURE9_SAVED_GB if name == "530B" else None
    saved = Fraction(outputs[0], 2**30)
    return [
        *entries,
        PaperEntry("figure9", name, "outputs freed on rank 0", "GiB", printed, saved, pipeline_rank=0),
    ]
