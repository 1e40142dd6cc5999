"""The activation memory of a transformer in training (arXiv 2205.05198): predicted by formula, counted in any model.

The names below are all that most programs need.  Each loads its module when it is first asked for, so shapes and
formulas need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actmem.config import ModelShape as ModelShape
    from actmem.config import Parallel as Parallel
    from actmem.formulas.activations import layer_rows as layer_rows
    from actmem.layers.gpt import GPT as GPT
    from actmem.layers.transformer import TransformerLayer as TransformerLayer
    from actmem.ledger.census import census as census
    from actmem.ledger.emulate import emulated_rank as emulated_rank
    from actmem.ledger.recorder import record as record
    from actmem.ledger.whole_step import step as step
    from actmem.ledger.whole_step import watch_step as watch_step
    from actmem.parallel.groups import tensor_parallel as tensor_parallel
    from actmem.recompute import checkpoint as checkpoint
    from actmem.rows import compare as compare

__version__ = "0.8.0"

#: The module in which each name is.
_HOMES = {
    "GPT": "layers.gpt",
    "ModelShape": "config",
    "Parallel": "config",
    "TransformerLayer": "layers.transformer",
    "census": "ledger.census",
    "checkpoint": "recompute",
    "compare": "rows",
    "emulated_rank": "ledger.emulate",
    "layer_rows": "formulas.activations",
    "record": "ledger.recorder",
    "step": "ledger.whole_step",
    "tensor_parallel": "parallel.groups",
    "watch_step": "ledger.whole_step",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'actmem' has no attribute {name!r}")
    return getattr(import_module(f"actmem.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
