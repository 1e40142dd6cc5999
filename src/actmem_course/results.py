"""What labs measure, a frozen class for each: from the measurement to the table, the figure and ``--json``.  Torch-free.

Only of labs/measure_runs.py; the other labs have rows of plain values.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from typing import Any


def plain(result: object) -> Any:
    """A result as JSON can hold it, for ``json.dumps(…, default=plain)``: its fields and what follows from them.

    Without fields that aren't in its ``repr``.
    """
    if isinstance(result, Fraction):
        return result.numerator if result.denominator == 1 else float(result)
    if not is_dataclass(result) or isinstance(result, type):
        raise TypeError(f"{type(result).__name__} is no result")
    computed = [name for name, value in vars(type(result)).items() if isinstance(value, property)]
    return {name: getattr(result, name) for name in [f.name for f in fields(result) if f.repr] + computed}


@dataclass(frozen=True)
class RunResult:
    """One run: its settings in words, the allocated peak that it logged and the predicted one, in MiB.

    framework: "nanotron" or "Megatron-LM".  limit_percent: how far apart the two may be.  moment: when the rank holds
    most, by prediction.  parts_bytes: the prediction by part.
    """

    framework: str
    setting: str
    printed_mib: float
    predicted_mib: float
    limit_percent: float
    moment: str = ""
    parts_bytes: dict[str, int] | None = None

    @property
    def difference_percent(self) -> float:
        """Predicted minus printed, in percent of the printed number."""
        return 100 * (self.predicted_mib / self.printed_mib - 1)

    @property
    def within_limit(self) -> bool:
        """Whether the difference is within the limit."""
        return abs(self.difference_percent) <= self.limit_percent


@dataclass(frozen=True)
class KernelSlope:
    """Bytes that one more token takes at a kernel's peak.  logged: of two peaks of a GPU, which are whole blocks."""

    kernel: str
    formula: str
    by_formula: int
    counted: float
    logged: float


@dataclass(frozen=True)
class PredictorLine:
    """How far a predictor is off on rows that GPUs logged, percent of the logged bytes.  by: who logged them."""

    predictor: str
    what: str
    rows: int
    mean_percent: float
    worst_percent: float
    by: str


@dataclass(frozen=True)
class CalculatorResult:
    """What one public calculator prints beside the bytes that were counted.  source: its file; why: why it is off, if it is."""

    calculator: str
    source: str
    row: str
    printed_bytes: int
    counted_bytes: int
    why: str

    @property
    def difference_bytes(self) -> int:
        """Printed minus counted."""
        return self.printed_bytes - self.counted_bytes

    @property
    def difference_percent(self) -> float:
        """The same in percent of the counted bytes."""
        return 100 * self.difference_bytes / self.counted_bytes


@dataclass(frozen=True)
class StepTimeResult:
    """One published step time, in the unit of its source, and ours.  unit: "s", "TFLOP/s" of a GPU, or "tokens/s" of a GPU."""

    source: str
    setting: str
    unit: str
    printed: float
    predicted: float

    @property
    def difference_percent(self) -> float:
        """Predicted minus printed, in percent of the printed number."""
        return 100 * (self.predicted / self.printed - 1)
