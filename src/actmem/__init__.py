"""The activation memory of 2205.05198: predicted by formula, counted in any model, extrapolated by tapes.

The names below are all that most programs need.  Each loads its module when it is first asked for, so shapes, formulas,
the evaluation of tapes and plans need no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actmem import plan, tape
    from actmem.config import ModelShape, Parallel
    from actmem.formulas.activations import layer_rows
    from actmem.layers.gpt import GPT
    from actmem.layers.llama import LlamaLayer
    from actmem.layers.transformer import TransformerLayer
    from actmem.llama_shape import LlamaShape
    from actmem.measure.census import census
    from actmem.measure.emulate import emulated_rank
    from actmem.measure.ledger import record
    from actmem.measure.whole_step import step, watch_step
    from actmem.parallel.groups import tensor_parallel
    from actmem.recompute import checkpoint
    from actmem.rows import compare

__version__ = "0.1.0"

#: Name → the module that defines it; of a package, nothing.
_HOMES = {
    "ModelShape": "config",
    "LlamaShape": "llama_shape",
    "Parallel": "config",
    "layer_rows": "formulas.activations",
    "tensor_parallel": "parallel.groups",
    "TransformerLayer": "layers.transformer",
    "GPT": "layers.gpt",
    "LlamaLayer": "layers.llama",
    "checkpoint": "recompute",
    "record": "measure.ledger",
    "census": "measure.census",
    "step": "measure.whole_step",
    "watch_step": "measure.whole_step",
    "emulated_rank": "measure.emulate",
    "compare": "rows",
    "tape": "",
    "plan": "",
}

__all__ = [
    "GPT",
    "LlamaLayer",
    "LlamaShape",
    "ModelShape",
    "Parallel",
    "TransformerLayer",
    "census",
    "checkpoint",
    "compare",
    "emulated_rank",
    "layer_rows",
    "plan",
    "record",
    "step",
    "tape",
    "tensor_parallel",
    "watch_step",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'actmem' has no attribute {name!r}")
    home = _HOMES[name]
    return getattr(import_module(f"actmem.{home}"), name) if home else import_module(f"actmem.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
