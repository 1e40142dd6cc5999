"""Known wastes, found in a ledger's rows: what each costs, what would remain, and the change that saves it.

A rule looks at operations, shapes and dtypes, never at names that only one library uses, except for
"norm".  Bytes are those of the rows found; the floor is what the change leaves of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_ATTENTION = (
    "scaled_dot_product_attention",
    "matmul",
    "bmm",
    "baddbmm",
    "softmax",
    "dropout",
    "multi_head_attention_forward",
    "masked_fill",
    "where",
    "mul",
    "add",
)
_LOSS = ("log_softmax", "cross_entropy", "nll_loss", "cross_entropy_loss")


@dataclass(frozen=True)
class Finding:
    """One waste.  bytes: what could go.  floor: what stays of these rows.  text: what is kept, and the change."""

    waste: str
    bytes: int
    floor: int
    text: str


def findings(rows: Iterable[Any]) -> list[Finding]:
    """All wastes found in a ledger's ``tensors``, the largest first; a row can be in two of them."""
    rows = [row for row in rows if row.bytes]
    found = [rule(rows) for rule in RULES]
    return sorted((one for one in found if one is not None and one.bytes), key=lambda one: -one.bytes)


def _size(rows: Iterable[Any]) -> int:
    return sum(row.bytes for row in rows)


def _in_modules(rows: list[Any]) -> Iterator[list[Any]]:
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(row.module, []).append(row)
    yield from groups.values()


def _is_float32(row: Any) -> bool:
    return str(row.dtype).endswith("float32")


def _is_mask(row: Any) -> bool:
    return str(row.dtype).endswith("bool")


def _square(row: Any) -> bool:
    """A tensor of attention scores' shape: ``[…, s, s]``."""
    return len(row.shape) >= 2 and row.shape[-1] == row.shape[-2] > 1


def _gelu(rows: list[Any]) -> Finding | None:
    kept, floor = [], 0
    for group in _in_modules(rows):
        of = [row for row in group if row.op in ("tanh", "pow", "mul", "add", "erf", "div")]
        shapes = {row.shape for row in of if row.op in ("tanh", "erf")}
        same = [row for row in of if row.shape in shapes]
        if shapes and len(same) >= 3 and len({row.op for row in same}) >= 2:
            kept += same
            floor += max(row.bytes for row in same)
    return _finding(
        "GeLU in several operations", kept, floor, "Each operation keeps its own tensors; F.gelu keeps its input alone."
    )


def _norm(rows: list[Any]) -> Finding | None:
    if not any(str(row.dtype).endswith(("bfloat16", "float16")) for row in rows):
        return None
    kept = [
        r
        for r in rows
        if _is_float32(r) and "norm" in r.module.rsplit(".", 1)[-1].lower() and r.shape and r.shape[-1] > 1
    ]
    text = "The norm keeps its input in float32; a fused kernel (nn.RMSNorm on a GPU) keeps it in 16 bits and one number a token."
    return _finding("norms in float32", kept, _size(kept) // 2, text)


def _math_attention(rows: list[Any]) -> Finding | None:
    kept = [row for row in rows if _square(row) and row.op in _ATTENTION and row.kind == "activation"]
    forced = [row for row in kept if row.op == "scaled_dot_product_attention"]
    why = (
        "dropout, or a mask of its own, makes scaled_dot_product_attention fall back to it"
        if forced
        else "it is written so"
    )
    text = f"Attention is computed by matrix products ({why}); a flash kernel keeps Q, K, V, the output and 4 bytes a head and token."
    return _finding("attention that keeps s²", kept, 0, text)


def _repeated(rows: list[Any]) -> Finding | None:
    kept = [row for row in rows if "repeated" in row.made_by]
    floor = sum(row.bytes // int(row.made_by.rsplit("×", 1)[1]) for row in kept)
    text = "K and V are copied for each query head; scaled_dot_product_attention(…, enable_gqa=True) reads them as they are."
    return _finding("repeated K and V", kept, floor, text)


def _silu(rows: list[Any]) -> Finding | None:
    kept = [row for row in rows if row.made_by in ("silu", "gelu", "sigmoid") and row.op in ("mul", "__mul__")]
    text = "The activation's result is kept for the product, and its input too; a function of both keeps the inputs and makes it again."
    return _finding("SiLU kept twice", kept, 0, text)


def _copied_experts(rows: list[Any]) -> Finding | None:
    kept = [row for row in rows if row.made_by == "picked from a weight"]
    return _finding(
        "expert weights copied per token",
        kept,
        0,
        "Each token gets a copy of its expert's weights; sort tokens and use a grouped product.",
    )


def _square_masks(rows: list[Any]) -> Finding | None:
    kept = [row for row in rows if _square(row) and (_is_mask(row) or row.kind == "constant")]
    return _finding(
        "masks of s²", kept, 0, "is_causal=True needs no mask; a mask added inside the product need not be kept."
    )


def _logits(rows: list[Any]) -> Finding | None:
    kept = [row for row in rows if _is_float32(row) and row.op in _LOSS and len(row.shape) >= 2]
    kept += [
        row for row in rows if kept and _is_float32(row) and row.shape[-1:] == kept[0].shape[-1:] and row not in kept
    ]
    floor = max((row.bytes for row in kept), default=0)
    return _finding(
        "float32 logits kept twice",
        kept,
        floor,
        "One function of logits and targets keeps a single copy, and can reuse it for the gradient.",
    )


def _gathered(rows: list[Any]) -> Finding | None:
    kept = [row for row in rows if row.made_by == "all-gather" and row.kind == "activation"]
    text = "The gathered input is kept on every rank; save the shard and gather again in backward (2205.05198 section 4.2.2)."
    return _finding("gathered inputs", kept, 0, text)


def _casts(rows: list[Any]) -> Finding | None:
    kept = [row for row in rows if row.kind == "cast weight"]
    return _finding(
        "casts of weights", kept, 0, "autocast keeps a copy of each weight until backward; hold the weights in 16 bits."
    )


def _finding(waste: str, kept: list[Any], floor: int, text: str) -> Finding | None:
    return Finding(waste, _size(kept) - floor, floor, text) if kept else None


RULES: tuple[Callable[[list[Any]], Finding | None], ...] = (
    _gelu, _norm, _math_attention, _repeated, _silu, _copied_experts, _square_masks, _logits, _gathered, _casts,
)  # fmt: skip
