"""Models that the planner knows by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import asdict, fields

from actmem.checks import ConfigError, shown
from actmem.llama_shape import LLAMA_MODELS
from actmem.models import PAPER_MODELS
from actmem.plan.decoder import Decoder
from actmem.plan.planned_gpt import PlannedGPT
from actmem.plan.planned_llama import PlannedLlama
from actmem.plan.planned_model import PlannedModel


def _paper(name: str) -> Callable[[], PlannedModel]:
    return lambda: PlannedGPT(name, PAPER_MODELS[name].shape)


#: Layers, vocabulary and sequence length; the layer itself is in LLAMA_MODELS, with sources.  Lengths are those of the
#: first stage of training (2407.21783, 2505.09388), and Mixtral's only one (2401.04088).
_DECODERS = {
    "llama3-8b": (32, 128256, 8192),
    "llama3-70b": (80, 128256, 8192),
    "llama3-405b": (126, 128256, 8192),
    "qwen3-32b": (64, 151936, 4096),
    "qwen3-30b-a3b": (48, 151936, 4096),
    "mixtral-8x7b": (32, 32000, 32768),
}


def _decoder(name: str) -> Callable[[], PlannedModel]:
    return lambda: PlannedLlama(name, known_decoder(name), _DECODERS[name][2])


#: Makes the model, by its name in lower case.
_MAKERS: dict[str, Callable[[], PlannedModel]] = {
    **{name.lower(): _paper(name) for name in PAPER_MODELS},
    **{name: _decoder(name) for name in _DECODERS},
}


def known_decoder(name: str) -> Decoder:
    """The sizes of a decoder by its name in ``known_names``."""
    layer, (num_layers, vocab_size, _) = LLAMA_MODELS[name], _DECODERS[name]
    wanted = {field.name for field in fields(Decoder)}
    sizes = {size: value for size, value in asdict(layer).items() if size in wanted and value is not None}
    return Decoder(num_layers=num_layers, vocab_size=vocab_size, **sizes)


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
