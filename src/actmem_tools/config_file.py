"""A Hugging Face ``config.json``: what is refused before anything is imported, and the order of its layers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actmem.config import ConfigError
from actmem_tools.command_line import one_line

#: What works where a configuration doesn't.
OTHERWISE = "record --fake --at, or plan with a factory (file.py:factory)"


def read_config(target: str) -> dict:
    """The file's content.  Raises ConfigError on what no model can be made of, or whose bytes have no bill here."""
    try:
        given = json.loads(Path(target).read_text(encoding="utf-8"), object_hook=_without_code)
        kind, a, k = (given.get(x) for x in ("model_type", "num_attention_heads", "num_key_value_heads"))
    except Exception as error:
        raise ConfigError("target", f"{target} is no configuration: {one_line(error)}") from error
    if not isinstance(kind, str):
        raise ConfigError("target", f"{target} names no model_type, so it is no config.json of transformers")
    if given.get("quantization_config"):
        raise ConfigError("target", f"{target} has a quantization_config, which has no bill here: leave it out")
    if given.get("is_encoder_decoder"):
        rule = f"{target} has an encoder and a decoder, and a configuration must be of a model of one stack"
        raise ConfigError("target", f"{rule}: {OTHERWISE} works")
    if isinstance(a, int) and isinstance(k, int) and k and a % k:
        raise ConfigError("target", f"{target} has {a} query heads and {k} key heads, no multiple")
    return given


def _without_code(fields: dict) -> dict:
    """A JSON object, unless transformers would fetch the kernel that it names, as ``attn_implementation:
    "owner/name"``, and run it."""
    for name, value in fields.items():
        if name.endswith("_implementation") and "/" in str(value):
            raise ValueError(f"{name} is somebody's kernel, whose code isn't run")
    return fields


@dataclass(frozen=True)
class Order:
    """Layers of several kinds: the first ones, then a group of ``period`` layers again and again.

    Such a group is what is called a block; of a model of equal layers each is one.
    """

    first: int = 0
    period: int = 1

    def num_layers(self, blocks: int) -> int:
        """Of so many blocks, with those before the first of them; 0 of none."""
        return self.first + blocks * self.period if blocks else 0

    def place(self, layer: int) -> int:
        """Among the first ones and one block, a layer of the same kind."""
        return layer if layer < self.first else self.first + (layer - self.first) % self.period


def order_of(kinds: Sequence[str]) -> Order:
    """The shortest order in which these kinds of layers repeat.  Raises ConfigError if they don't."""
    number = len(kinds)
    found = [
        Order(first, period)
        for period in range(1, number // 2 + 1)
        for first in range(number % period, number - 2 * period + 1, period)
        if all(kinds[i] == kinds[i + period] for i in range(first, number - period))
    ]
    if number > 1 and not found:
        rule = f"its {number} layers of {len({*kinds})} kinds repeat in no order, so they have no formula"
        raise ConfigError("target", f"{rule}: {OTHERWISE} works")
    return min(found, key=lambda order: (order.num_layers(2), order.first), default=Order())
