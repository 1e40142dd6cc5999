"""What labs hand to tables and figures, a frozen class for each.  Torch-free, so that a page can draw it.

With ``--json`` a lab writes ``asdict`` of these; ``read`` makes them again.
"""

from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from actmem_course.results.exchange_results import ExchangeCount, ParityResult, SocketCount
from actmem_course.results.memory_results import ModeCost, Number, OtherLine, PaperEntry, PipelineResult, Table2Result
from actmem_course.results.run_results import CalculatorResult, PaperChoiceResult, RunResult, StepTimeResult
from actmem_course.results.speed_results import (
    Claim,
    Overhead,
    PeerLine,
    ScalingPoint,
    ScalingSlopes,
    SpeedLine,
    TimedPair,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = [
    "CalculatorResult", "Claim", "ExchangeCount", "ModeCost", "Number", "OtherLine", "Overhead", "PaperChoiceResult", "PaperEntry", "ParityResult", "PeerLine", "PipelineResult", "RunResult", "ScalingPoint",
    "ScalingSlopes", "SocketCount", "SpeedLine", "StepTimeResult", "Table2Result", "TimedPair", "read",
]  # fmt: skip

_Result = TypeVar("_Result", bound="DataclassInstance")


def read(kind: type[_Result], values: Mapping) -> _Result:
    """A result from its JSON object; what ``kind`` has no field for is left out."""
    hints = get_type_hints(kind)
    return kind(**{name: _made(hints[name], value) for name, value in values.items() if name in hints})


def _made(hint: Any, value: Any) -> Any:
    """A field's value, with the results that are in it."""
    for part in (hint, *get_args(hint)):
        if not (isinstance(part, type) and is_dataclass(part)):
            continue
        if isinstance(value, Mapping):
            return read(part, value)
        if isinstance(value, list):
            return [read(part, one) for one in value]
    return value
