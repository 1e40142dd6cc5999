"""Read a Hugging Face ``config.json``, refuse models that can't be planned, and find how kinds of layers alternate.

Nothing here imports torch or transformers.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actmem.config import ConfigError
from actmem_tools.command_line import one_line

#: What the user can do if a configuration can't be planned.
OTHERWISE = "record --fake --at, or plan with a factory (file.py:factory)"


def read_config(target: str) -> dict:
    """Read a ``config.json`` of Hugging Face's transformers, and check that ``actmem plan`` can plan its model.

    Args:
        target: the file's path.

    Returns: the file's JSON object, unchanged.

    Raises: ConfigError if the file is no such configuration; or if its model can't be planned, because it is quantized,
        because its key heads don't divide its query heads, or because it names a kernel that would be downloaded.
    """
    try:
        given = json.loads(Path(target).read_text(encoding="utf-8"), object_hook=_without_code)
        kind, a, k = (given.get(x) for x in ("model_type", "num_attention_heads", "num_key_value_heads"))
    except Exception as error:
        raise ConfigError("target", f"{target} is no configuration: {one_line(error)}") from error
    if not isinstance(kind, str):
        raise ConfigError("target", f"{target} names no model_type, so it is no config.json of transformers")
    if given.get("quantization_config"):
        raise ConfigError("target", f"{target} has a quantization_config, which has no bill here: leave it out")
    if isinstance(a, int) and isinstance(k, int) and k and a % k:
        raise ConfigError("target", f"{target} has {a} query heads and {k} key heads, no multiple")
    return given


def _without_code(fields: dict) -> dict:
    """Return a JSON object unchanged.

    Raises: ValueError if it names a kernel that transformers would fetch and run, as
        ``attn_implementation: "owner/name"``.
    """
    for name, value in fields.items():
        if name.endswith("_implementation") and "/" in str(value):
            raise ValueError(f"{name} is somebody's kernel, whose code isn't run")
    return fields


@dataclass(frozen=True)
class Order:
    """How kinds of layers alternate in a model: ``first`` single layers, then blocks of ``period`` layers each.

    All blocks are equal: layer i of one block is of the same kind as layer i of every other block.  If all layers of
    the model are equal, each layer is a block.

    Attributes:
        first: how many layers come before the first block.
        period: how many layers a block has.
        after_encoder: whether these layers belong to a decoder, before which an encoder runs.
    """

    first: int = 0
    period: int = 1
    after_encoder: bool = False

    def num_layers(self, blocks: int) -> int:
        """Return how many layers a model with this many blocks has, the ``first`` ones included; 0 for 0 blocks."""
        return self.first + blocks * self.period if blocks else 0

    def place(self, layer: int) -> int:
        """Return the index of the model's first layer that is of the same kind as layer ``layer`` (both from 0).

        ``ConfigModel.factory`` copies that layer's settings when it makes a model with another number of layers.
        """
        return layer if layer < self.first else self.first + (layer - self.first) % self.period


def order_of(kinds: Sequence[str]) -> Order:
    """Return the Order of a model's layers: after how many layers, and in blocks of how many, their kinds repeat.

    Args:
        kinds: one text for each layer; layers with equal texts run the same operations.

    Returns: the order; if several fit, the one in which the second block ends earliest.

    Raises: ConfigError if the kinds don't repeat.
    """
    number = len(kinds)
    orders = [
        Order(first, period)
        for period in range(1, number // 2 + 1)
        for first in range(number % period, number - 2 * period + 1, period)
        if all(kinds[i] == kinds[i + period] for i in range(first, number - period))
    ]
    if number > 1 and not orders:
        rule = f"its {number} layers of {len({*kinds})} kinds repeat in no order, so they have no formula"
        raise ConfigError("target", f"{rule}: {OTHERWISE} works")
    return min(orders, key=lambda order: (order.num_layers(2), order.first), default=Order())
