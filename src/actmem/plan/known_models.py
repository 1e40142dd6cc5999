"""Models that the planner knows by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from actmem.checks import ConfigError, shown
from actmem.models import PAPER_MODELS
from actmem.plan.decoder import Decoder
from actmem.plan.planned_gpt import PlannedGPT
from actmem.plan.planned_llama import PlannedLlama
from actmem.plan.planned_model import PlannedModel


def _paper(name: str) -> Callable[[], PlannedModel]:
    return lambda: PlannedGPT(name, PAPER_MODELS[name].shape)


#: From the published config.json of meta-llama/Llama-3.1-8B, -70B and -405B, and of Qwen/Qwen3-32B; the sequence
#: lengths are those of their first stage of training, and Qwen3's of its config.
_DECODERS = {
    "llama3-8b": (Decoder(4096, 14336, 32, 32, 8, 128256), 8192),
    "llama3-70b": (Decoder(8192, 28672, 80, 64, 8, 128256), 8192),
    "llama3-405b": (Decoder(16384, 53248, 126, 128, 8, 128256), 8192),
    "qwen3-32b": (Decoder(5120, 25600, 64, 64, 8, 151936, head_size=128, qk_norm=True), 4096),
}


def _decoder(name: str) -> Callable[[], PlannedModel]:
    return lambda: PlannedLlama(name, *_DECODERS[name])


#: Makes the model, by its name in lower case.
_MAKERS: dict[str, Callable[[], PlannedModel]] = {
    **{name.lower(): _paper(name) for name in PAPER_MODELS},
    **{name: _decoder(name) for name in _DECODERS},
}


def known_decoder(name: str) -> Decoder:
    """The sizes of a decoder by its name in ``known_names``."""
    return _DECODERS[name][0]


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
