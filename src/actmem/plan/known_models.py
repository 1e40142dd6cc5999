"""Models that the planner knows by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from actmem.checks import ConfigError, shown
from actmem.models import PAPER_MODELS
from actmem.plan.planned_gpt import PlannedGPT
from actmem.plan.planned_model import PlannedModel


def _paper(name: str) -> Callable[[], PlannedModel]:
    return lambda: PlannedGPT(name, PAPER_MODELS[name].shape)


#: Makes the model, by its name in lower case.
_MAKERS: dict[str, Callable[[], PlannedModel]] = {name.lower(): _paper(name) for name in PAPER_MODELS}


def known_names() -> list[str]:
    """Every name that ``planned_model_of`` takes."""
    return list(_MAKERS)


def planned_model_of(name: str) -> PlannedModel:
    """The model of that name, in upper or lower case; ConfigError, with the nearest names, on another one."""
    maker = _MAKERS.get(name.lower())
    if maker is None:
        near = difflib.get_close_matches(name.lower(), _MAKERS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(_MAKERS)}"
        raise ConfigError("model", f"{shown(name)} is not known; {hint}")
    return maker()
