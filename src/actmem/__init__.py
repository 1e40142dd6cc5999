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

#: The modules in which the names are; tape and plan are packages themselves.
_HOMES = {
    "config": ("ModelShape", "Parallel"),
    "llama_shape": ("LlamaShape",),
    "formulas.activations": ("layer_rows",),
    "parallel.groups": ("tensor_parallel",),
    "layers.transformer": ("TransformerLayer",),
    "layers.gpt": ("GPT",),
    "layers.llama": ("LlamaLayer",),
    "recompute": ("checkpoint",),
    "measure.ledger": ("record",),
    "measure.census": ("census",),
    "measure.whole_step": ("step", "watch_step"),
    "measure.emulate": ("emulated_rank",),
    "rows": ("compare",),
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
    if name not in __all__:
        raise AttributeError(f"module 'actmem' has no attribute {name!r}")
    home = next((home for home, names in _HOMES.items() if name in names), None)
    return getattr(import_module(f"actmem.{home}"), name) if home else import_module(f"actmem.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
