"""Training runs that others published beside what we predict, and what public calculators print beside what was counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RunResult:
    """One run: its settings in words, the printed peak and the predicted one, in MiB.

    framework: "nanotron" or "torchtitan".  printed_mib: what the run logged; printed_kind: "allocated", or
    "reserved" where the allocator's own share is in it.  predicted_mib: None where we don't predict.
    moment: when the rank holds most, by prediction.  parts_bytes: the prediction by part.  limit_percent: how far apart
    the two may be; None where the printed number isn't what we predict.  note: why there is no prediction.
    """

    framework: str
    setting: str
    printed_mib: float
    printed_kind: str
    predicted_mib: float | None
    moment: str = ""
    parts_bytes: dict[str, int] | None = None
    limit_percent: float | None = None
    note: str = ""

    @property
    def difference_percent(self) -> float | None:
        """Predicted minus printed, in percent of the printed number; None without a prediction."""
        if self.predicted_mib is None:
            return None
        return 100 * (self.predicted_mib / self.printed_mib - 1)

    @property
    def within_limit(self) -> bool | None:
        """Whether the difference is within the limit; None where there is none."""
        if self.limit_percent is None or self.difference_percent is None:
            return None
        return abs(self.difference_percent) <= self.limit_percent


@dataclass(frozen=True)
class PaperChoiceResult:
    """The paper's plan for one of its models beside the fastest of one search, by predicted time.

    behind_percent: how much longer the paper's takes.  hidden_seconds: data-parallel traffic of the fastest that is
    assumed to hide behind its computation.
    """

    model: str
    search: str
    paper_plan: str
    paper_seconds: float
    best_plan: str
    best_seconds: float
    behind_percent: float
    hidden_seconds: float


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
