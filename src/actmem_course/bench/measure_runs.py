"""Runs that others published, predicted from what their framework's code keeps; nothing is fitted to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from actmem.checks import ConfigError, check_size, shown
from actmem.plan.bill import Bill
from actmem.plan.layout import Layout
from actmem.plan.nanotron import nanotron_peak
from actmem.plan.published import (
    NANOTRON_GLOBAL_BATCH,
    NANOTRON_MODEL,
    NANOTRON_RUNS,
    NANOTRON_SEQ_LENGTH,
    NanotronRun,
)
from actmem_course.results import RunResult

MIB = 2**20
#: How far apart a nanotron run's printed and predicted peak may be.
LIMIT_PERCENT = 0.2
_SIZES = ("gpus", "dp", "tp", "pp", "mbz")


def predict_nanotron(gpus: int, dp: int, tp: int, pp: int, mbz: int) -> Bill:
    """The bill of rank 0 of the 1.1B Llama at its peak.  Raises ConfigError on sizes that don't fit together."""
    layout = Layout(dp, tp, pp, mbz)
    if layout.num_devices != gpus:
        raise ConfigError("gpus", f"must be dp · tp · pp = {layout.num_devices}, got {gpus}")
    count = layout.num_microbatches(NANOTRON_GLOBAL_BATCH)
    return nanotron_peak(NANOTRON_MODEL, layout, NANOTRON_SEQ_LENGTH, count)


def nanotron_result(run: NanotronRun) -> RunResult:
    """One nanotron run, printed and predicted."""
    bill = predict_nanotron(run.gpus, run.dp, run.tp, run.pp, run.mbz)
    return RunResult(
        "nanotron",
        f"{run.gpus} GPUs dp {run.dp} tp {run.tp} pp {run.pp} mbz {run.mbz}",
        run.peak_allocated_mib,
        "allocated",
        bill.bytes / MIB,
        bill.moment,
        bill.by_part(),
        LIMIT_PERCENT,
    )


def measure_runs() -> list[RunResult]:
    """All published runs."""
    return [nanotron_result(run) for run in NANOTRON_RUNS]


def read_rows(path: Path) -> list[dict]:
    """A JSON list of objects with the sizes of runs of the 1.1B Llama.  Raises ConfigError on anything else."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError("rows", f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError("rows", f"{path} is not JSON") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError("rows", f"{path} must hold a list of objects")
    for number, row in enumerate(rows):
        _check_row(number, row)
    return rows


def _check_row(number: int, row: Mapping) -> None:
    for name in _SIZES:
        if name not in row:
            raise ConfigError("rows", f"object {number} has no {name}")
        check_size(f"rows, object {number}: {name}", row[name])
    peak = row.get("peak_allocated_mib")
    number_or_none = peak is None or (isinstance(peak, (int, float)) and not isinstance(peak, bool) and peak > 0)
    if not number_or_none:
        raise ConfigError("rows", f"object {number}: peak_allocated_mib must be a number above 0, got {shown(peak)}")


def predict_rows(rows: Sequence[Mapping]) -> list[dict]:
    """The same objects with ``predicted_mib``.  Raises ConfigError that names the object that can't be a run."""
    predicted = []
    for number, row in enumerate(rows):
        try:
            bill = predict_nanotron(**{name: row[name] for name in _SIZES})
        except ConfigError as error:
            raise ConfigError("rows", f"object {number}: {error}") from None
        predicted.append({**row, "predicted_mib": bill.bytes / MIB})
    return predicted


def result_of_row(row: Mapping) -> RunResult | None:
    """A predicted object as a result to show; None if it has no peak to compare with."""
    peak = row.get("peak_allocated_mib")
    sizes = {name: row[name] for name in _SIZES}
    return None if peak is None else nanotron_result(NanotronRun(**sizes, peak_allocated_mib=float(peak)))
