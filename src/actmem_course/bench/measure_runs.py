"""Runs that others published, predicted from what their framework's code keeps; nothing is fitted to them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from actmem.config import PAPER_MODELS, ConfigError, Parallel, check_size, shown
from actmem_course.others.golden import LIMITS, GoldenResult
from actmem_course.others.nanotron import nanotron_peak
from actmem_course.others.paper import TABLE5
from actmem_course.others.published import (
    LLAMA3_RUNS,
    NANOTRON_GLOBAL_BATCH,
    NANOTRON_MODEL,
    NANOTRON_RUNS,
    NANOTRON_SEQ_LENGTH,
    TITAN_RUNS,
    Choice,
    NanotronRun,
    llama3_sizes,
    paper_sizes,
    published_choices,
)
from actmem_course.results import RunResult, StepTimeResult
from actmem_tools.plan.planned_models import PlannedModel, planned_model_of
from actmem_tools.plan.search import Bill, find_plans
from actmem_tools.plan.step_time import DEVICES, GIBIBYTE, Cluster

MIB = 2**20
#: How far apart a nanotron run's printed and predicted peak may be.
LIMIT_PERCENT = 0.2
_MOST_MIB = 2**40
_SIZES = ("gpus", "dp", "tp", "pp", "mbz")


def predict_nanotron(run: NanotronRun) -> Bill:
    """The bill of rank 0 of the 1.1B Llama at its peak.  Raises ConfigError on sizes that don't fit together."""
    layout = Parallel(run.tp, True, run.pp, micro_batch_size=run.mbz, data_parallel_size=run.dp)
    if layout.num_devices != run.gpus:
        raise ConfigError("gpus", f"must be dp · tp · pp = {layout.num_devices}, got {run.gpus}")
    count = layout.num_microbatches(NANOTRON_GLOBAL_BATCH)
    return nanotron_peak(NANOTRON_MODEL, layout, NANOTRON_SEQ_LENGTH, count)


def nanotron_result(run: NanotronRun) -> RunResult:
    """One nanotron run, printed and predicted."""
    bill = predict_nanotron(run)
    return RunResult(
        "nanotron",
        f"{run.gpus} GPUs dp {run.dp} tp {run.tp} pp {run.pp} mbz {run.mbz}",
        run.peak_allocated_mib,
        bill.bytes / MIB,
        LIMIT_PERCENT,
        bill.moment,
        bill.by_part(),
    )


def golden_result(result: GoldenResult) -> RunResult:
    """One of NVIDIA's rows that is predicted and has a logged peak."""
    assert result.row.peak_bytes and result.predicted_peak_bytes
    return RunResult(
        "Megatron-LM",
        f"{result.row.case.split('/')[-1]}, {result.row.gpu}",
        result.row.peak_bytes / MIB,
        result.predicted_peak_bytes / MIB,
        LIMITS[result.row.kind],
    )


def measure_runs() -> list[RunResult]:
    """All published runs of nanotron."""
    return [nanotron_result(run) for run in NANOTRON_RUNS]


def step_time_results() -> list[StepTimeResult]:
    """Published step times beside the planner's: the paper's table 5, the Llama 3 report, torchtitan's eager 8B."""
    results = []
    for name, time in TABLE5.items():
        paper = PAPER_MODELS[name]
        place = planned_model_of(name), paper.num_devices, "a100", paper.global_batch_size
        for printed, mode in ((time.seconds, "selective"), (time.full_recompute_seconds, "full")):
            seconds = predicted_seconds(*place, mode, paper_sizes(paper, mode == "selective"))
            results.append(StepTimeResult("2205.05198 table 5", f"{name}, {mode}", "s", printed, seconds))
    for run in LLAMA3_RUNS:
        model = planned_model_of("llama3-405b").with_sizes(seq_length=run.seq_length)
        batch = run.data_parallel_size * run.batch_per_data_rank
        cut = llama3_sizes(run) | {"micro_batch_size": 1, "sequence_parallel": True, "zero_stage": 1}
        seconds = predicted_seconds(model, run.gpus, "h100", batch, "none", cut)
        rate = model.model_flops(batch) / seconds / run.gpus / 1e12
        setting = f"405B, {run.gpus} GPUs, CP {run.context_parallel_size}, s {run.seq_length}, 1F1B"
        results.append(StepTimeResult("2407.21783 table 4", setting, "TFLOP/s", run.tflops, rate))
    whole = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "context_parallel_size": 1, "zero_stage": 3}
    for titan in (run for run in TITAN_RUNS if run.recompute == "selective" and not run.changed):
        model = planned_model_of(titan.model).with_sizes(seq_length=titan.seq_length)
        batch = titan.data_parallel_size * titan.local_batch_size
        seconds = predicted_seconds(model, titan.gpus, "h100", batch, "elementwise", whole)
        rate = titan.seq_length * batch / seconds / titan.gpus
        setting = f"8B, {titan.gpus} GPUs, FSDP, elementwise for selective"
        results.append(StepTimeResult("torchtitan", setting, "tokens/s", titan.tokens_per_second, rate))
    return results


def predicted_seconds(
    model: PlannedModel, gpus: int, device: str, global_batch_size: int, recompute: str, sizes: Mapping[str, int]
) -> float:
    """Seconds of one step of the layout with these sizes, whatever the memory.  Raises ConfigError if there is none."""
    cluster = Cluster(gpus, 2**20 * GIBIBYTE, device=DEVICES[device])
    found = find_plans(model.with_modes([recompute]), cluster, global_batch_size, 1, sizes, windows=False)
    if not found.plans:
        raise ConfigError("sizes", f"{model.name} has no plan on {gpus} GPUs with {sizes}")
    return found.plans[0].seconds.total


def choice_results() -> list[Choice]:
    """Published layouts beside the fastest plans that their code could run."""
    return list(published_choices())


def predicted_rows(path: Path) -> tuple[list[dict], list[RunResult]]:
    """A JSON list of objects with the sizes of runs of the 1.1B Llama, each with its ``predicted_mib``; those with a peak as results.

    Raises ConfigError on anything else, and names the object that can't be a run.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("rows", f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError("rows", f"{path} is not JSON") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError("rows", f"{path} must hold a list of objects")
    results = []
    for number, row in enumerate(rows):
        run = _run_of(number, row)
        try:
            result = nanotron_result(run)
        except ConfigError as error:
            raise ConfigError("rows", f"object {number}: {error}") from None
        row["predicted_mib"] = result.predicted_mib
        results += [result] if run.peak_allocated_mib else []
    return rows, results


def _run_of(number: int, row: Mapping) -> NanotronRun:
    """The run of one object, its peak 0 where it gives none."""
    for name in _SIZES:
        if name not in row:
            raise ConfigError("rows", f"object {number} has no {name}")
        check_size(f"rows, object {number}: {name}", row[name])
    peak = row.get("peak_allocated_mib")
    if peak is not None and (isinstance(peak, bool) or not isinstance(peak, (int, float)) or not 0 < peak < _MOST_MIB):
        raise ConfigError("rows", f"object {number}: peak_allocated_mib must be a number above 0, got {shown(peak)}")
    return NanotronRun(**{name: row[name] for name in _SIZES}, peak_allocated_mib=float(peak or 0))
