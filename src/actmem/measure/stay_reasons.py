"""Why a tensor is kept: what the backward of the operation that saved it reads it for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

_PRODUCTS = (
    "bmm",
    "baddbmm",
    "matmul",
    "mm",
    "__matmul__",
    "einsum",
    "mul",
    "__mul__",
    "__rmul__",
    "div",
    "__truediv__",
)
_ATTENTION = (
    "scaled_dot_product_attention",
    *(f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "cudnn", "efficient")),
    "flash_attn_func",
)
_MASK = "backward drops the same elements, by this mask"
_SECOND_RUN = "a second run in backward starts from it"
_CHECKPOINTS = ("checkpoint", "CheckpointFunction")
#: Operations by name, and why each keeps what it keeps.
_REASONS = (
    (("linear", "addmm", "_GatherInBackward", "conv1d", "conv2d"), "the gradient of a weight is computed from the layer's input"),
    (("layer_norm", "rms_norm", "group_norm", "batch_norm"), "the gradient of a norm is computed from its input and its statistics"),
    (("softmax", "log_softmax", "sigmoid", "tanh", "exp", "rsqrt", "sqrt"), "this operation's gradient is computed from its own result"),
    (("gelu", "silu", "relu", "leaky_relu", "pow", "square", "sin", "cos", "log"), "this activation's gradient is computed from its input"),
    (("dropout", "native_dropout"), _MASK),
    (("embedding",), "the gradient of the table needs the ids"),
    (("cross_entropy", "nll_loss", "cross_entropy_loss"), "the loss's gradient is computed from the probabilities and the targets"),
    (_PRODUCTS, "the gradient of each factor is computed from the other one"),
    (_ATTENTION, "a fused kernel makes the scores again from Q, K and V, and keeps its output to do so"),
    (_CHECKPOINTS, "a checkpoint runs its region again from its inputs"),
)  # fmt: skip
_OF_KIND = {
    "generator state": "the second run draws the same dropout from it",
    "cast weight": "backward reads the weight in the dtype in which the product ran",
    "gathered weight": "the weight was gathered for forward and not freed after it",
}


def reason_of(row: Any) -> str:
    """One clause on why ``row``, a SavedTensor or a line of a record's file, is kept for backward."""
    if row.kind in _OF_KIND:
        return _OF_KIND[row.kind]
    if row.held_by:
        return f"{row.held_by} holds it, whatever autograd does"
    if row.op == "_Keep":
        is_mask = "bool" in str(row.dtype) and row.kind == "activation"
        return _MASK if is_mask else _SECOND_RUN
    return next((reason for names, reason in _REASONS if row.op in names), f"{row.op or 'an operation'} saves it")


def runs_again(rows: Iterable[Any]) -> bool:
    """True if one of ``rows`` is there for a second run: recomputation is on."""
    return any(reason_of(row) in (_OF_KIND["generator state"], _SECOND_RUN, _REASONS[-1][1]) for row in rows)
