"""What the paper says, model by model, with ours: tables 2 to 5, figures 1, 7 and 9, equations 7 and 8.

Bytes of a model are counted on one pipeline rank, emulated, with everything in flight: it runs the real GPT part on
torch's fake backend, through the schedule's own actions, up to the moment at which it holds most.

FLOPs and parameters: of the whole model.  On the meta device tensors have shapes and no numbers; ``torch.utils.flop_counter``
counts matrix products from the shapes that reach them, so logits and attention count, and
looking up embeddings, softmax, layer norm, GeLU, dropout, biases and the loss do not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, partial

import torch
from torch.utils.flop_counter import FlopCounterMode

from actmem.config import PAPER_MODELS, ModelShape, PaperModel, Parallel, check_divides
from actmem.formulas.activations import TABLE2, Configuration, closed_form, layer_bytes
from actmem.formulas.first_stage import (
    HEAD_TERMS,
    bytes_by_rank,
    eq5,
    eq6,
    interleave_factor,
    layers_per_chunk,
    section43_extras,
    stage_output_rows,
    stage_rows,
)
from actmem.formulas.flops import eq7, eq8, hardware_flops, text_selective
from actmem.formulas.schedule import Action, Schedule, held, interleaved, one_forward_one_backward
from actmem.formulas.states import ADAM, num_parameters, parameter_counts, state_rows
from actmem.layers.gpt import GPT
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.parts import measure_stage
from actmem.parallel.groups import tensor_parallel
from actmem.rows import Row, compare, extra_rows, paper_rows, total
from actmem_course.bench.layer_table import LayerTable
from actmem_course.others import paper
from actmem_course.others.disagreements import baseline_share, disagreements
from actmem_course.ranks import Ranks
from actmem_course.results import PaperEntry, Table2Result

_CONFIGURATIONS = {configuration.name: configuration for configuration in TABLE2 if configuration.tensor_parallel}

#: The rows of table 2 that t ranks share: what figure 7 compares.
STAGE_CONFIGURATIONS = tuple(_CONFIGURATIONS)


@dataclass(frozen=True)
class PaperStage:
    """One pipeline rank of a model of table 3, in one configuration of table 2."""

    model_name: str
    configuration_name: str
    pipeline_rank: int = 0

    @property
    def model(self) -> PaperModel:
        return PAPER_MODELS[self.model_name]

    @property
    def configuration(self) -> Configuration:
        return _CONFIGURATIONS[self.configuration_name]

    @property
    def parallel(self) -> Parallel:
        """Table 3's cut of the model, with or without sequence parallelism."""
        return replace(self.model.parallel, sequence_parallel=self.configuration.sequence_parallel)

    @property
    def num_microbatches(self) -> int:
        return num_microbatches(self.model)

    @property
    def _sizes(self) -> tuple:
        return self.model.shape, self.parallel, self.pipeline_rank, self.configuration.recompute, self.num_microbatches

    def rows(self) -> list[Row]:
        """Predicted: the paper's terms."""
        return paper_rows(stage_rows(*self._sizes))

    def extra_rows(self) -> list[Row]:
        """Predicted: what the paper leaves out."""
        return extra_rows(stage_rows(*self._sizes))

    def chunks(self) -> list[range]:
        """The layers of each model chunk of this rank: chunk c is stage c·p + r of the model."""
        per_chunk, p = layers_per_chunk(self.model.shape, self.parallel), self.parallel.pipeline_parallel_size
        stages = [chunk * p + self.pipeline_rank for chunk in range(self.parallel.num_model_chunks)]
        return [range(stage * per_chunk, (stage + 1) * per_chunk) for stage in stages]

    def actions(self) -> list[Action]:
        """This rank's part of the schedule, up to the first moment at which it holds most."""
        actions = schedule(self.model_name)[self.pipeline_rank]
        forward_bytes = {chunk: self._forward_bytes(layers) for chunk, layers in enumerate(self.chunks())}
        curve = held(actions, lambda action: forward_bytes[action.chunk])
        return actions[: curve.index(max(curve)) + 1]

    def _forward_bytes(self, layers: range) -> int:
        """What one chunk's forward adds by formula: its layers, and an end of the model if it has one."""
        shape, parallel = self.model.shape, self.parallel
        size = len(layers) * layer_bytes(shape, parallel, self.configuration.recompute)
        if layers.start == 0:
            _, b, h, s = shape.letters()
            size += s * b * h // parallel.sequence_parts
        if layers.stop == shape.num_layers:
            size += sum(row.bytes for row in self.rows() if row.term in HEAD_TERMS)
        return size


def num_microbatches(model: PaperModel) -> int:
    """Microbatches of one iteration, without data parallelism."""
    return model.global_batch_size // model.shape.micro_batch_size


@cache
def schedule(model_name: str) -> Schedule:
    """The model's schedule: interleaved where table 3 has more than one chunk, else 1F1B."""
    model = PAPER_MODELS[model_name]
    p, m = model.parallel.pipeline_parallel_size, model.parallel.num_model_chunks
    n = num_microbatches(model)
    return one_forward_one_backward(p, n) if m == 1 else interleaved(p, m, n)


@cache
def measure_paper_stage(stage: PaperStage) -> list[Row]:
    """Rows of what the rank keeps at its fullest, by the ledger, in bfloat16 on an emulated rank of t."""
    actions = [(action.kind, action.chunk, action.microbatch) for action in stage.actions()]
    with emulated_rank(stage.parallel.tensor_parallel_size):
        tp = tensor_parallel(sequence_parallel=stage.parallel.sequence_parallel)
        return measure_stage(stage.model.shape, tp, stage.chunks(), actions, recompute=stage.configuration.recompute)


def meta_model(shape: ModelShape, recompute: str = "none") -> GPT:
    """The whole model on one device, without storage."""
    with torch.device("meta"):
        # Built without naming the device: its random-number generators need a real one.
        model = GPT(shape, recompute=recompute, dtype=torch.bfloat16)
    return model.to("meta")


def count_flops(shape: ModelShape, recompute: str = "none") -> dict[str, int]:
    """FLOPs of one microbatch through all layers, forward and backward, by torch operator."""
    model = meta_model(shape, recompute)
    tokens = torch.zeros(shape.micro_batch_size, shape.seq_length, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        model.loss(model(tokens), tokens).backward()
    return {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}


@cache
def count_iteration(model_name: str, recompute: str) -> dict[str, int]:
    """The same for a whole iteration of a paper model: all of its equal microbatches."""
    model = PAPER_MODELS[model_name]
    b = model.shape.micro_batch_size
    times = check_divides("global_batch_size", model.global_batch_size, "micro_batch_size", b)
    return {operator: times * count for operator, count in count_flops(model.shape, recompute).items()}


@cache
def count_parameters(model_name: str) -> tuple[int, int]:
    """Parameters of the whole model, and of its first pipeline rank's share, both by building the GPT."""
    model = PAPER_MODELS[model_name]
    whole = sum(parameter.numel() for parameter in meta_model(model.shape).parameters())
    return whole, _first_rank(model)


def _first_rank(model: PaperModel) -> int:
    chunks = PaperStage(model.name, "tensor+sequence").chunks()
    with emulated_rank(model.parallel.tensor_parallel_size):
        tp = tensor_parallel(sequence_parallel=True)
        parts = [GPT(model.shape, tp, layers=layers, dtype=torch.bfloat16) for layers in chunks]
        return sum(parameter.numel() for part in parts for parameter in part.parameters())


# Entries of one model, section by section.

_BASELINE, _BOTH = "tensor", "tensor+sequence+selective"

#: Figure 1 prints no optimizer; this is Megatron's, 18 bytes a parameter.
_ADAM = "float32 gradients"

#: What section 6.1 says of figure 7, in percent of the baseline.
_FIGURE7_PRINTED = {_BOTH: paper.FIGURE7_BOTH_PERCENT_BELOW, "full": paper.FIGURE7_FULL_PERCENT}


@cache
def measure_layer_of(name: str) -> list[Table2Result]:
    """Table 2 for one layer of a paper model, on one emulated rank of its t."""
    model = PAPER_MODELS[name]
    t = model.parallel.tensor_parallel_size
    with emulated_rank(t):
        return LayerTable(model.shape).measure(Ranks(0, t, "cpu", emulated=True), torch.bfloat16)


def table2(name: str) -> list[PaperEntry]:
    """Bytes of one layer on one rank: the row's own formula, the sum of named tensors, the ledger."""
    shape, t = PAPER_MODELS[name].shape, PAPER_MODELS[name].parallel.tensor_parallel_size
    return [
        PaperEntry(
            "table2", name, row.name, "bytes", closed_form(row, shape, t), found.predicted_bytes, found.extra_bytes,
            found.measured_bytes, found.disagreement, note=f"sbh({row.formula()})",
        )
        for row, found in zip(TABLE2, measure_layer_of(name))
    ]  # fmt: skip


def _stage_entry(section: str, quantity: str, stage: PaperStage, **more) -> PaperEntry:
    predicted, extra, measured = stage.rows(), stage.extra_rows(), measure_paper_stage(stage)
    comparison = compare(predicted + extra, measured)
    return PaperEntry(
        section, stage.model_name, quantity, "bytes", ours_formula=total(predicted), extra=total(extra), measured=total(measured),
        disagreement="" if comparison.exact else comparison.describe(), **more,
    )  # fmt: skip


def figure1(name: str) -> list[PaperEntry]:
    """Everything on a GPU of the first stage: states, activations before and after, the two sums."""
    model, (_, counted) = PAPER_MODELS[name], count_parameters(name)
    predicted = total(state_rows(model.shape, model.parallel, adam=_ADAM))
    measured = counted * sum(state.bytes_per_parameter for state in ADAM[_ADAM])
    quantity = "parameters, optimizer"
    entries = [PaperEntry("figure1", name, quantity, "bytes", ours_formula=predicted, measured=measured)]
    for configuration, label in ((_BASELINE, "baseline"), (_BOTH, "both methods")):
        stage = PaperStage(name, configuration)
        together = predicted + total(stage.rows())
        fits = "fits" if together <= paper.A100_BYTES else "does not fit"
        activations = _stage_entry("figure1", f"activations, {label}", stage)
        entries += [
            activations,
            PaperEntry(
                "figure1", name, f"all, {label}", "bytes", ours_formula=together, extra=activations.extra,
                measured=measured + total(measure_paper_stage(stage)), disagreement=activations.disagreement,
                note=f"{together / 2**30:.1f} GiB, {fits}",
            ),
        ]  # fmt: skip
    return entries


def figure7(name: str) -> list[PaperEntry]:
    """First-stage bytes in five configurations, then each in percent of the tensor-parallel one."""
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
        return _stage_entry("figure7", stage.configuration_name, stage)
    label, layers = equation
    factor = interleave_factor(p, m)
    printed = layers(shape, t) * factor + section43_extras(shape, t, p)  # whole, as p·m divides L
    by = f"{label} × {float(factor):.3f} + §4.3" if m > 1 else f"{label} + §4.3"
    return _stage_entry("figure7", stage.configuration_name, stage, paper=int(printed), note=by)


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
    return total(measure_paper_stage(stage)) - total(stage.extra_rows())


def _measured_ranks(name: str) -> list[int]:
    """The embedding's rank, an inner one, and the output layer's; the ranks between differ by a constant."""
    return [0, 1, PAPER_MODELS[name].parallel.pipeline_parallel_size - 1]


def figure9(name: str) -> list[PaperEntry]:
    """Bytes on every pipeline rank with both methods, and what outputs would add that are not freed."""
    first, entries = PaperStage(name, _BOTH), []
    shape, parallel, n = first.model.shape, first.parallel, first.num_microbatches
    outputs = [total(stage_output_rows(shape, parallel, r, n)) for r in range(parallel.pipeline_parallel_size)]
    for rank, size in enumerate(bytes_by_rank(shape, parallel, "selective", n)):
        quantity = f"rank {rank}"
        if rank in _measured_ranks(name):
            entries.append(_stage_entry("figure9", quantity, PaperStage(name, _BOTH, rank), pipeline_rank=rank))
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
    """Devices, and parameters of the GPT that these sizes give."""
    model, (whole, first_rank) = PAPER_MODELS[name], count_parameters(name)
    predicted, named = num_parameters(model.shape), _NAMED_PARAMETERS[name]
    per_rank = sum(parameter_counts(model.shape, model.parallel).values())
    entry = partial(PaperEntry, "table3", name)
    return [
        entry("GPUs, t · p", "", paper.TABLE3_DEVICES[name], model.num_devices, note="as printed"),
        entry("parameters", "", named, predicted, measured=whole, note="as its name says"),
        entry("parameters on rank 0", "", None, per_rank, measured=first_rank),
    ]


def table4(name: str) -> list[PaperEntry]:
    """Overhead of one 22B layer in percent: as printed, and from the printed milliseconds."""
    base = paper.TABLE4["baseline, no recompute"]
    entries = []
    for row, time in paper.TABLE4.items():
        ours = None if time is base else 100 * (time.combined_ms / base.combined_ms - 1)
        quantity = f"{row}: {time.forward_ms} + {time.backward_ms} ms"
        entries.append(PaperEntry("table4", name, quantity, "%", time.overhead_percent, ours))
    return entries


def table5_entries(name: str) -> list[PaperEntry]:
    """Gain, MFU and HFU as printed and from the printed times; MFU also from counted FLOPs."""
    model, time, percent = PAPER_MODELS[name], paper.TABLE5[name], partial(paper.percent_of_peak, name)
    full, both = time.full_recompute_seconds, time.seconds
    flops, hardware = (equation(model.shape, model.global_batch_size) for equation in (eq7, eq8))
    counted = sum(count_iteration(name, "none").values())
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


def flops_entries(name: str) -> list[PaperEntry]:
    """FLOPs of one iteration in every mode, then the MFU and HFU that they give."""
    model, time, percent = PAPER_MODELS[name], paper.TABLE5[name], partial(paper.percent_of_peak, name)
    sizes = model.shape, model.global_batch_size
    printed = {"none": eq7(*sizes), "selective": eq8(*sizes), "paper-selective": eq8(*sizes)}
    entry = partial(PaperEntry, "flops", name)
    counts, uses = [], []
    for way in _WAYS:
        by_text = way.recompute == "paper-selective"
        predicted = text_selective(*sizes) if by_text else hardware_flops(*sizes, way.recompute)
        operators = count_iteration(name, way.recompute)
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
    """Every number of ours in others.disagreements, with what the paper says there; not about one model."""
    return [
        PaperEntry("disagreements", value.label, found.where, value.unit, found.printed, value.value, note=found.why)
        for found in disagreements()
        for value in found.ours
    ]
