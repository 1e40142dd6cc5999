"""The paper's term for each saved tensor of our layer.

Identified by the running module, the operation and the argument; never by size, because two
different tensors can have the same size.  A tensor without a rule keeps the ledger's own name,
so the comparison shows it as not predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from actmem import keep
from actmem.layers import context, experts, latent, llama_parts
from actmem.measure.ledger import SavedTensor
from actmem.parallel import linear, vocab
from actmem.rows import Row

_LINEAR_INPUT = (linear.FUNCTIONS["column_parallel"].__name__, "linear")
_KEEP = keep.FUNCTIONS["keep"].__name__
_LOOKUP, _CROSS_ENTROPY = (vocab.FUNCTIONS[name].__name__ for name in ("lookup", "cross_entropy"))

#: Arguments of the core attention, in the order in which a checkpoint keeps them (after the anchor).
_CORE_ARGUMENTS = {"1": "Q", "2": "K", "3": "V", "4": "causal mask", "5": "random-number state"}
_BADDBMM_ARGUMENTS = {"1": "Q", "2": "K"}


def term_name(saved: SavedTensor) -> str:
    """The term that formulas use for this tensor, or a description of it."""
    module, op, argument = saved.module, saved.op, saved.argument
    last = module.rsplit(".", 1)[-1]
    if op == _KEEP and not argument.isdigit():
        return argument  # kept by name, see ``drop``
    if op == "layer_norm" and last in ("norm1", "norm2"):
        part = "input" if argument else "statistics"
        return f"layer-norm {last[-1]} {part}"
    if op == "layer_norm" and last == "final_norm":
        return "final layer-norm input" if argument else "final layer-norm statistics"
    if op == _CROSS_ENTROPY:
        return "target ids" if argument else "logits (float32)"
    if op == _LOOKUP:
        return "token ids"
    if last in _LINEAR_TERMS and op in _LINEAR_INPUT:
        return _LINEAR_TERMS[last]
    if last == "mlp" and op == "gelu":
        return "GeLU input"
    if op == _KEEP and last in _MASK_TERMS:
        return _MASK_TERMS[last]
    if last == "core":
        named = _core_term(op, argument)
        if named:
            return named
    if last == "attention" and op == _KEEP:
        return _CORE_ARGUMENTS.get(argument, f"{module}: {op} {argument}")
    if op == _KEEP and saved.dtype is torch.uint8:
        return "random-number state"
    if op == _KEEP and argument == "1":
        # A checkpoint of the whole layer keeps what layer norm 1 would have saved.
        return "layer-norm 1 input"
    return f"{module or 'root'}: {op} {argument}".rstrip()


_LINEAR_TERMS = {
    "qkv": "QKV projection input",
    "projection": "attention projection input",
    "up": "h→4h input",
    "down": "4h→h input",
    "output": "output layer input",
}
_MASK_TERMS = {
    "embedding_dropout": "embedding dropout mask",
    "dropout_mask": "softmax dropout mask",
    "attention_dropout": "attention dropout mask",
    "mlp_dropout": "MLP dropout mask",
}


def _core_term(op: str, argument: str) -> str:
    if op == "baddbmm":
        return _BADDBMM_ARGUMENTS.get(argument, "")
    if op == "bmm":
        return {"0": "softmax dropout output", "1": "V"}.get(argument, "")
    if op == "softmax" and not argument:
        return "softmax output"
    return ""


_COLUMNS = linear.FUNCTIONS["column_parallel"].__name__
_ROWS, _NORM, _SWIGLU = (llama_parts.FUNCTIONS[name].__name__ for name in ("product", "rms_norm", "swiglu"))
_CHOSEN, _TO_EXPERTS = (experts.FUNCTIONS[name].__name__ for name in ("chosen_scores", "to_experts"))
_EXPERT_SWIGLU, _EXPERT_ROWS = (experts.FUNCTIONS[name].__name__ for name in ("weighted_swiglu", "expert_rows"))
#: The second to the fourth are what ``emulate.cuda_without_device`` runs in place of the first.
_ATTENTION = (
    "scaled_dot_product_attention",
    *(f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "cudnn", "efficient")),
)
_PART = context.FUNCTIONS["attend_part"].__name__
_UNEVEN = latent.FUNCTIONS["attend_uneven"].__name__
_SEED = "attention seed"  # of a GPU's kernel, and its offset
#: Where attention runs: alone, over one part of the sequence, over some heads.  → the term of what it makes.
_KERNELS = {
    **{("attention", op): "attention projection input" for op in _ATTENTION},
    ("attention", _PART): "attention projection input",
    ("attention", _UNEVEN): "attention projection input",
    **{("core", op): "attention output before all-to-all" for op in _ATTENTION},
}
#: The key that all heads share: it lies beside the latent in one tensor, of which the norm reads the latent.
_SHARED_KEY = "{} (rest of its storage)"
#: Today's layer: module, operation, argument (none: made by the operation) → term.
_LLAMA_TERMS = {
    **{(f"norm{n}", _NORM, "0"): f"norm {n} input" for n in (1, 2)},
    **{(f"norm{n}", _NORM, ""): f"norm {n} statistics" for n in (1, 2)},
    ("attention", _COLUMNS, "0"): "QKV projection input",
    **{(f"{name.lower()}_norm", _NORM, "0"): f"{name} before its norm" for name in "QK"},
    **{(f"{name.lower()}_norm", _NORM, ""): f"{name} norm statistics" for name in "QK"},
    **{(f"{name.lower()}_down", _ROWS, "0"): "QKV projection input" for name in ("Q", "KV")},
    **{(f"{name.lower()}_latent_norm", _NORM, "0"): f"{name} latent" for name in ("Q", "KV")},
    **{(f"{name.lower()}_latent_norm", _NORM, ""): f"{name} latent norm statistics" for name in ("Q", "KV")},
    ("kv_latent_norm", _NORM, _SHARED_KEY.format(0)): "KV latent",
    **{(f"{name.lower()}_up", _COLUMNS, "0"): f"{name} up-projection input" for name in ("Q", "KV")},
    **{(where, op, str(i)): name for where, op in _KERNELS for i, name in enumerate("QKV")},
    ("attention", _ROWS, "0"): "attention projection input",
    ("mlp", _COLUMNS, "0"): "gate and up input",
    ("mlp", _SWIGLU, "0"): "gate",
    ("mlp", _SWIGLU, "1"): "up",
    ("mlp", _ROWS, "0"): "down input",
    ("router", _ROWS, "0"): "router input",
    ("mlp", _CHOSEN, "1"): "chosen experts",
    **{("mlp", function, ""): "routing weights" for function in ("softmax", "sigmoid")},
    ("mlp", _TO_EXPERTS, "1"): "dispatch order",
    ("mlp", _EXPERT_SWIGLU, "0"): "gate",
    ("mlp", _EXPERT_SWIGLU, "1"): "up",
    ("mlp", _EXPERT_SWIGLU, "2"): "dispatched weights",
    ("mlp", _EXPERT_ROWS, "0"): "down input",
    ("shared", _SWIGLU, "0"): "shared gate",
    ("shared", _SWIGLU, "1"): "shared up",
    ("shared", _ROWS, "0"): "shared down input",
    ("", _KEEP, "1"): "norm 1 input",  # a checkpoint of the whole layer
}


def llama_term_name(saved: SavedTensor) -> str:
    """The term of today's layer that formulas use for this tensor, or a description of it."""
    module, op, argument = saved.module.rsplit(".", 1)[-1], saved.op, saved.argument
    if op == _KEEP and not argument.isdigit():
        kept = argument  # by name, see ``drop``
        if kept == "log-sum-exp" and not saved.dtype.is_floating_point:
            return _SEED
        return "KV latent" if kept == _SHARED_KEY.format("KV latent") else kept
    if (module, op) in _KERNELS and not argument:
        if not saved.dtype.is_floating_point:
            return _SEED
        # The kernel's output has a dimension for the elements of a head; its log-sum-exp has none, or of size 1.
        return _KERNELS[module, op] if len(saved.shape) == 4 and saved.shape[-1] > 1 else "log-sum-exp"
    return _LLAMA_TERMS.get((module, op, argument), f"{module or 'root'}: {op} {argument}".rstrip())


def rows_by_term(saved: Iterable[SavedTensor], name: Callable[[SavedTensor], str] = term_name) -> list[Row]:
    """One row for each saved tensor, named as in the formulas."""
    return [Row(name(t), t.bytes, source=f"{t.module or 'layer'}: {t.op}, {t.line}") for t in saved]
