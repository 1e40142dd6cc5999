"""The paper's numbers beside ours, model by model: tables 2 to 5, figures 1, 7 and 9, equations 7 and 8."""

from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import cache, partial
from typing import Any

import measure_table2
import torch

from actmem.config import PAPER_MODELS
from actmem.formulas.activations import TABLE2, closed_form
from actmem.formulas.flops import eq7, eq8, hardware_flops, text_selective
from actmem.formulas.stages import bytes_by_rank, eq5, eq6, interleave_factor, section43_extras, stage_output_rows
from actmem.formulas.states import ADAM, num_parameters, parameter_counts, state_rows
from actmem.ledger.emulate import emulated_rank
from actmem.rows import compare, total
from actmem_course.lab_tools import paper_models
from actmem_course.lab_tools.paper_models import STAGE_CONFIGURATIONS, PaperStage
from actmem_course.others import paper
from actmem_course.others.disagreements import baseline_share, disagreements
from actmem_course.ranks import Ranks

Number = int | float | Fraction


@dataclass(frozen=True)
class PaperEntry:
    """One number of the paper beside the number that we predict and the one that we measure.

    Attributes:
        section: the part of the paper, a key of SECTIONS in measure_paper.py, such as "table2".
        model: the paper's model, such as "175B"; in the section "disagreements" the label of the number.
        quantity: what the number says, such as "parameters on rank 0".
        unit: such as "bytes" or "%"; "" for a plain number.
        paper: the number that the paper prints, or that a formula in it gives; a text if the paper has no number there;
            None if it says nothing.
        ours_formula: the number that we predict, without ``extra``; None if we predict none.
        extra: bytes of the tensors that we predict and the paper doesn't count.
        measured: the measured number; None if nothing was measured.
        disagreement: lines of text that list the tensors whose measured bytes differ from the prediction; "" if none
            does.
        pipeline_rank: in figure 9, the number of the pipeline rank; else None.
        note: one line that is printed for the reader; "" for none.
    """

    section: str
    model: str
    quantity: str
    unit: str
    paper: Number | str | None = None
    ours_formula: Number | None = None
    extra: int = 0
    measured: Number | None = None
    disagreement: str = ""
    pipeline_rank: int | None = None
    note: str = ""

    @property
    def difference(self) -> Number | None:
        """Measured minus predicted, with ``extra`` counted as predicted; None if nothing was measured."""
        return None if self.measured is None else self.measured - (self.ours_formula or 0) - self.extra

    @property
    def printed(self) -> Number | None:
        """The field ``paper`` if it is a number; None if it is a text or None."""
        return self.paper if isinstance(self.paper, Number) else None

    @property
    def difference_from_paper(self) -> Number | None:
        """Our predicted number minus the paper's number; None if one of the two is missing."""
        if self.ours_formula is None or self.printed is None:
            return None
        # A printed number is a decimal, and a difference of decimals is read as one.
        ours = float(self.ours_formula) if isinstance(self.printed, float) else self.ours_formula
        return ours - self.printed

    @property
    def exact(self) -> bool | None:
        """Whether measured equals predicted, tensor by tensor; None if nothing was measured."""
        return None if self.measured is None else not (self.difference or self.disagreement)

    def as_row(self) -> dict[str, Any]:
        """Return the fields and the computed properties as a dict that JSON can hold."""
        computed = ("difference", "printed", "difference_from_paper", "exact")
        values = {**asdict(self), **{name: getattr(self, name) for name in computed}}
        return {name: plain(value) if isinstance(value, Fraction) else value for name, value in values.items()}


def plain(number: Fraction) -> int | float:
    """Return a fraction as a number that JSON can hold: an int if it is whole, else a float."""
    return number.numerator if number.denominator == 1 else float(number)


_BASELINE, _BOTH = "tensor", "tensor+sequence+selective"

#: Figure 1 prints no optimizer; this is Megatron's, 18 bytes a parameter.
_ADAM = "float32 gradients"

#: What section 6.1 says of figure 7, in percent of the baseline.
_FIGURE7_PRINTED = {_BOTH: paper.FIGURE7_BOTH_PERCENT_BELOW, "full": paper.FIGURE7_FULL_PERCENT}


@cache
def measure_layer(name: str) -> list[dict[str, Any]]:
    """Measure Table 2 for one layer of a paper model, on one emulated rank of its t.

    Args:
        name: the model's name in ``PAPER_MODELS``, such as "175B".

    Returns: for each configuration of the table the dict that ``measure_table2.measure`` returns.
    """
    model = PAPER_MODELS[name]
    t = model.parallel.tensor_parallel_size
    with emulated_rank(t):
        here = Ranks(0, t, "cpu", emulated=True)
        return [measure_table2.measure(model.shape, one, here, torch.bfloat16) for one in TABLE2]


def table2(name: str) -> list[PaperEntry]:
    """Compare the paper's table 2 with our numbers, for one layer of a paper model on one emulated rank.

    Args:
        name: the model's name in ``PAPER_MODELS``, such as "175B".

    Returns: an entry for each configuration, in bytes: ``paper`` by the paper's formula, ``ours_formula`` and ``extra``
        by our sum over tensors, and ``measured``.
    """
    shape, t = PAPER_MODELS[name].shape, PAPER_MODELS[name].parallel.tensor_parallel_size
    return [
        PaperEntry(
            "table2", name, row.name, "bytes", closed_form(row, shape, t), found["predicted_bytes"],
            found["extra_bytes"], found["measured_bytes"], found["disagreement"], note=f"sbh({row.formula()})",
        )
        for row, found in zip(TABLE2, measure_layer(name))
    ]  # fmt: skip


def stage_entry(section: str, quantity: str, stage: PaperStage, **more) -> PaperEntry:
    """Make the entry with the predicted and the measured bytes of one pipeline rank.

    Args:
        section: the part of the paper, such as "figure7".
        quantity: what the number says, such as "rank 0".
        stage: the model, the configuration and the pipeline rank.
        more: further fields of ``PaperEntry``, by name.
    """
    predicted, extra, measured = stage.rows(), stage.extra_rows(), paper_models.measure_paper_stage(stage)
    comparison = compare(predicted + extra, measured)
    return PaperEntry(
        section, stage.model_name, quantity, "bytes", ours_formula=total(predicted), extra=total(extra),
        measured=total(measured), disagreement="" if comparison.exact else comparison.describe(), **more,
    )  # fmt: skip


def figure1(name: str) -> list[PaperEntry]:
    """Return figure 1's entries: the memory of a GPU of the first stage.

    They are the training states, the activations without and with the paper's techniques, and the two sums.

    Args:
        name: the model's name in ``PAPER_MODELS``, such as "175B".
    """
    model, (_, counted) = PAPER_MODELS[name], paper_models.count_parameters(name)
    predicted = total(state_rows(model.shape, model.parallel, adam=_ADAM))
    measured = counted * sum(state.bytes_per_parameter for state in ADAM[_ADAM])
    quantity = "parameters, optimizer"
    entries = [PaperEntry("figure1", name, quantity, "bytes", ours_formula=predicted, measured=measured)]
    for configuration, label in ((_BASELINE, "baseline"), (_BOTH, "both methods")):
        stage = PaperStage(name, configuration)
        together = predicted + total(stage.rows())
        fits = "fits" if together <= paper.A100_BYTES else "does not fit"
        activations = stage_entry("figure1", f"activations, {label}", stage)
        entries += [
            activations,
            PaperEntry(
                "figure1", name, f"all, {label}", "bytes", ours_formula=together, extra=activations.extra,
                measured=measured + total(paper_models.measure_paper_stage(stage)),
                disagreement=activations.disagreement, note=f"{together / 2**30:.1f} GiB, {fits}",
            ),
        ]  # fmt: skip
    return entries


def figure7(name: str) -> list[PaperEntry]:
    """Return figure 7's entries: bytes of the first stage in five configurations, and their shares.

    A share is in percent of the bytes with tensor parallelism alone.

    Args:
        name: the model's name in ``PAPER_MODELS``, such as "175B".
    """
    entries = [_first_stage(PaperStage(name, configuration)) for configuration in STAGE_CONFIGURATIONS]
    for configuration in STAGE_CONFIGURATIONS:
        if configuration != _BASELINE:
            entries += _shares(name, configuration)
    return entries


def _first_stage(stage: PaperStage) -> PaperEntry:
    """paper: equation 5 or 6 with the interleave factor and section 4.3's extras, exactly as printed."""
    parallel, shape = stage.parallel, stage.model.shape
    t, p, m = parallel.tensor_parallel_size, parallel.pipeline_parallel_size, parallel.num_model_chunks
    equation = {"tensor+sequence": ("eq. 5", eq5), _BOTH: ("eq. 6", eq6)}.get(stage.configuration_name)
    if equation is None:
        return stage_entry("figure7", stage.configuration_name, stage)
    label, layers = equation
    factor = interleave_factor(p, m)
    printed = layers(shape, t) * factor + section43_extras(shape, t, p)  # whole, as p·m divides L
    by = f"{label} × {float(factor):.3f} + §4.3" if m > 1 else f"{label} + §4.3"
    return stage_entry("figure7", stage.configuration_name, stage, paper=int(printed), note=by)


def _shares(name: str, configuration: str) -> list[PaperEntry]:
    printed = _FIGURE7_PRINTED.get(configuration)
    layer = baseline_share(configuration, PAPER_MODELS[name])
    this, base = PaperStage(name, configuration), PaperStage(name, _BASELINE)
    stage = Fraction(total(this.rows()), total(base.rows()))
    counted = Fraction(_paper_bytes(this), _paper_bytes(base))
    return [
        PaperEntry("figure7", name, f"{configuration}, one layer", "%", printed, 100 * layer),
        PaperEntry("figure7", name, f"{configuration}, first stage", "%", printed, 100 * stage, measured=100 * counted),
    ]


def _paper_bytes(stage: PaperStage) -> int:
    """Measured bytes without those that the paper leaves out."""
    return total(paper_models.measure_paper_stage(stage)) - total(stage.extra_rows())


def figure9(name: str) -> list[PaperEntry]:
    """Return figure 9's entries, for sequence parallelism and selective recomputation.

    For every pipeline rank these are the bytes that it saves, and the bytes that it would hold in addition if it did
    not free the stage's outputs after sending them (appendix B).

    Args:
        name: the model's name in ``PAPER_MODELS``, such as "530B".
    """
    first, entries = PaperStage(name, _BOTH), []
    shape, parallel, n = first.model.shape, first.parallel, first.num_microbatches
    outputs = [total(stage_output_rows(shape, parallel, r, n)) for r in range(parallel.pipeline_parallel_size)]
    for rank, size in enumerate(bytes_by_rank(shape, parallel, "selective", n)):
        quantity = f"rank {rank}"
        # The embedding's rank, an inner one, and the output layer's; the ranks between differ by a constant.
        if rank in (0, 1, parallel.pipeline_parallel_size - 1):
            entries.append(stage_entry("figure9", quantity, PaperStage(name, _BOTH, rank), pipeline_rank=rank))
        else:
            entries.append(PaperEntry("figure9", name, quantity, "bytes", ours_formula=size, pipeline_rank=rank))
        freed = outputs[rank]
        entries.append(
            PaperEntry("figure9", name, f"outputs of {quantity}", "bytes", ours_formula=freed, pipeline_rank=rank)
        )
    printed = paper.FIGURE9_SAVED_GB if name == "530B" else None
    saved = Fraction(outputs[0], 2**30)
    return [*entries, PaperEntry("figure9", name, "outputs freed on rank 0", "GiB", printed, saved, pipeline_rank=0)]


#: Table 3 names its models by their parameters.
_NAMED_PARAMETERS = {"22B": 22 * 10**9, "175B": 175 * 10**9, "530B": 530 * 10**9, "1T": 10**12}


@dataclass(frozen=True)
class _Way:
    """One way to run an iteration.  full: it is timed by table 5's other column, full recomputation."""

    recompute: str
    flops: str
    use: str
    full: bool = False


_WAYS = (
    _Way("none", "model, eq. 7", "MFU"),
    _Way("paper-selective", "selective, text: eq. 7 + 4BLs²h", "HFU, selective by the text"),
    _Way("selective", "selective, ours: eq. 7 + 2BLs²h", "HFU, selective, ours"),
    _Way("paper-full", "full, to the end: layers × 4/3", "HFU, full recomputation", full=True),
    _Way("full", "full, ours: without the last 4h→h", "", full=True),
)


def table3(name: str) -> list[PaperEntry]:
    """Return table 3's entries: the number of GPUs, and the parameters of a GPT of these sizes.

    Args:
        name: the model's name in ``PAPER_MODELS``, such as "175B".
    """
    model, (whole, first_rank) = PAPER_MODELS[name], paper_models.count_parameters(name)
    predicted, named = num_parameters(model.shape), _NAMED_PARAMETERS[name]
    per_rank = sum(parameter_counts(model.shape, model.parallel).values())
    entry = partial(PaperEntry, "table3", name)
    return [
        entry("GPUs, t · p", "", paper.TABLE3_DEVICES[name], model.parallel.num_devices, note="as printed"),
        entry("parameters", "", named, predicted, measured=whole, note="as its name says"),
        entry("parameters on rank 0", "", None, per_rank, measured=first_rank),
    ]


def table4(name: str) -> list[PaperEntry]:
    """Return table 4's entries: overheads of one layer in percent, as printed and from the printed milliseconds.

    Args:
        name: "22B", the only model that table 4 is about.
    """
    base = paper.TABLE4["baseline, no recompute"]
    entries = []
    for row, time in paper.TABLE4.items():
        ours = None if time is base else 100 * (time.combined_ms / base.combined_ms - 1)
        quantity = f"{row}: {time.forward_ms} + {time.backward_ms} ms"
        entries.append(PaperEntry("table4", name, quantity, "%", time.overhead_percent, ours))
    return entries


def table5(name: str) -> list[PaperEntry]:
    """Return table 5's entries: throughput gain, MFU and HFU, as printed and computed from the printed times.

    MFU is computed from counted FLOPs, too.

    Args:
        name: the model's name in ``PAPER_MODELS``, such as "175B".
    """
    model, time, percent = PAPER_MODELS[name], paper.TABLE5[name], partial(paper.percent_of_peak, name)
    full, both = time.full_recompute_seconds, time.seconds
    flops, hardware = (equation(model.shape, model.global_batch_size) for equation in (eq7, eq8))
    counted = sum(paper_models.count_iteration(name, "none").values())
    entry = partial(PaperEntry, "table5", name)
    without = "MFU with full recomputation"
    entries = [
        entry("gain in throughput", "%", time.gain_percent, 100 * (full / both - 1)),
        entry("MFU, eq. 7", "%", time.mfu_percent, percent(flops, both), measured=percent(counted, both)),
        entry("HFU, eq. 8", "%", time.hfu_percent, percent(hardware, both)),
        entry(without, "%", None, percent(flops, full), measured=percent(counted, full)),
    ]
    if name == "530B":
        run = paper.DATA_PARALLEL_530B
        label = f"MFU, {run.num_devices} GPUs, {run.data_parallel_size}-way data parallel"
        entries.append(entry(label, "%", run.mfu_percent, paper.mfu_percent(name, run.seconds)))
        entries.append(entry("the same with full recomputation", "%", run.full_recompute_mfu_percent))
    return entries


def flops(name: str) -> list[PaperEntry]:
    """Return entries for the FLOPs of one iteration in every mode of recomputation, and the MFU and HFU from these.

    Args:
        name: the model's name in ``PAPER_MODELS``, such as "175B".
    """
    model, time, percent = PAPER_MODELS[name], paper.TABLE5[name], partial(paper.percent_of_peak, name)
    sizes = model.shape, model.global_batch_size
    printed = {"none": eq7(*sizes), "selective": eq8(*sizes), "paper-selective": eq8(*sizes)}
    entry = partial(PaperEntry, "flops", name)
    counts, uses = [], []
    for way in _WAYS:
        by_text = way.recompute == "paper-selective"
        predicted = text_selective(*sizes) if by_text else hardware_flops(*sizes, way.recompute)
        operators = paper_models.count_iteration(name, way.recompute)
        counted = sum(operators.values())
        note = ", ".join(f"{operator} {count:,}" for operator, count in operators.items())
        counts.append(entry(way.flops, "FLOPs", printed.get(way.recompute), predicted, measured=counted, note=note))
        if way.use:
            seconds = time.full_recompute_seconds if way.full else time.seconds
            share = time.mfu_percent if way.recompute == "none" else None if way.full else time.hfu_percent
            measured = percent(counted, seconds)
            uses.append(entry(way.use, "%", share, percent(predicted, seconds), measured=measured))
    by_eq8 = entry("HFU, selective by eq. 8", "%", time.hfu_percent, percent(eq8(*sizes), time.seconds))
    return [*counts, uses[0], by_eq8, *uses[1:]]


def disagreement_entries(name: str) -> list[PaperEntry]:
    """Return entries for the places where the paper doesn't agree with itself (``others.disagreements``).

    Each entry has a number that we computed again, and what the paper prints there.

    Args:
        name: not used, because these places are not about one model; all sections' functions have this argument.
    """
    return [
        PaperEntry("disagreements", value.label, found.where, value.unit, found.printed, value.value, note=found.why)
        for found in disagreements()
        for value in found.ours
    ]
