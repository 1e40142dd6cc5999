"""What the paper says about parameters, FLOPs and seconds, model by model, with ours: tables 3 to 5, equations 7 and 8."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from actmem.formulas.flops import A100_FLOPS_PER_SECOND, eq7, eq8, hardware_flops, text_selective, utilisation
from actmem.formulas.states import num_parameters, parameter_counts
from actmem.models import PAPER_MODELS
from actmem_course.bench.reproduce.jobs import Job, Results
from actmem_course.bench.reproduce.meta_model import count_iteration, count_parameters
from actmem_course.others import paper
from actmem_course.others.disagreements import disagreements
from actmem_course.others.table5 import data_parallel_530b_mfu_percent
from actmem_course.results import PaperEntry

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


def parameters_job(name: str) -> Job:
    """The job whose result is (parameters of the whole model, parameters on pipeline rank 0)."""
    return Job(count_parameters, (name,), f"{name}, parameters")


def count_job(name: str, recompute: str) -> Job:
    """The job whose result is the counted FLOPs of an iteration, by operator."""
    return Job(count_iteration, (name, recompute), f"{name}, FLOPs, {recompute}")


def table3_jobs(name: str) -> list[Job]:
    return [parameters_job(name)]


def table3(name: str, results: Results) -> list[PaperEntry]:
    """Devices, and parameters of the GPT that these sizes give."""
    model, (whole, first_rank) = PAPER_MODELS[name], results[parameters_job(name)]
    predicted, named = num_parameters(model.shape), _NAMED_PARAMETERS[name]
    per_rank = sum(parameter_counts(model.shape, model.parallel).values())
    entry = partial(PaperEntry, "table3", name)
    return [
        entry("GPUs, t · p", "", paper.TABLE3_DEVICES[name], model.num_devices, note="as printed"),
        entry("parameters", "", named, predicted, measured=whole, note="as its name says"),
        entry("parameters on rank 0", "", None, per_rank, measured=first_rank),
    ]


def table4(name: str, results: Results) -> list[PaperEntry]:
    """Overhead of one 22B layer in percent: as printed, and from the printed milliseconds."""
    base = paper.TABLE4["baseline, no recompute"]
    entries = []
    for row, time in paper.TABLE4.items():
        ours = None if time is base else 100 * (time.combined_ms / base.combined_ms - 1)
        quantity = f"{row}: {time.forward_ms} + {time.backward_ms} ms"
        entries.append(PaperEntry("table4", name, quantity, "%", time.overhead_percent, ours))
    return entries


def _percent(model_name: str, flops: int, seconds: float) -> float:
    """Share of the A100s' highest rate."""
    return 100 * utilisation(flops, seconds, PAPER_MODELS[model_name].num_devices, A100_FLOPS_PER_SECOND)


def table5_jobs(name: str) -> list[Job]:
    return [count_job(name, "none")]


def table5_entries(name: str, results: Results) -> list[PaperEntry]:
    """Gain, MFU and HFU as printed and from the printed times; MFU also from counted FLOPs."""
    model, time, percent = PAPER_MODELS[name], paper.TABLE5[name], partial(_percent, name)
    full, both = time.full_recompute_seconds, time.seconds
    flops, hardware = (equation(model.shape, model.global_batch_size) for equation in (eq7, eq8))
    counted = sum(results[count_job(name, "none")].values())
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
        entries.append(entry(label, "%", run.mfu_percent, data_parallel_530b_mfu_percent()))
        entries.append(entry("the same with full recomputation", "%", run.full_recompute_mfu_percent))
    return entries


def flops_jobs(name: str) -> list[Job]:
    return [count_job(name, way.recompute) for way in _WAYS]


def flops_entries(name: str, results: Results) -> list[PaperEntry]:
    """FLOPs of one iteration in every mode, then the MFU and HFU that they give."""
    model, time, percent = PAPER_MODELS[name], paper.TABLE5[name], partial(_percent, name)
    sizes = model.shape, model.global_batch_size
    printed = {"none": eq7(*sizes), "selective": eq8(*sizes), "paper-selective": eq8(*sizes)}
    entry = partial(PaperEntry, "flops", name)
    counts, uses = [], []
    for way in _WAYS:
        by_text = way.recompute == "paper-selective"
        predicted = text_selective(*sizes) if by_text else hardware_flops(*sizes, way.recompute)
        operators = results[count_job(name, way.recompute)]
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


def disagreement_entries(name: str, results: Results) -> list[PaperEntry]:
    """Every number of ours in others.disagreements, with what the paper says there; not about one model."""
    return [
        PaperEntry("disagreements", value.label, found.where, value.unit, found.printed, value.value, note=found.why)
        for found in disagreements()
        for value in found.ours
    ]
