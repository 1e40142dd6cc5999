"""``python -m actmem diff a.json b.json``: which tensors came, went and stayed between two records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from actmem.command_line import Parser
from actmem.config import ConfigError
from actmem.measure.ledger_tables import HEADINGS, aligned, fold, lines_of, rows_of_file


def main(argv: list[str]) -> int:
    """Run the command; 2 and one line on bad input."""
    parser = Parser("diff", "Compare two files of `record --json FILE`.")
    parser.add_argument("before")
    parser.add_argument("after")
    return parser.run(argv, lambda options: print(diff_text(_read(options.before), _read(options.after))) or 0)


def _read(path: str) -> list[Any]:
    try:
        rows = rows_of_file(json.loads(Path(path).read_text(encoding="utf-8"))["rows"])
        _ = [_key(row) for row in rows]  # all fields are there
        return rows
    except OSError as error:
        raise ConfigError(path, error.strerror or "can't be read") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(path, "is no file of `python -m actmem record … --json FILE`") from error


def _key(row: Any) -> tuple:
    return row.module, row.op, row.argument, row.shape, row.dtype, row.bytes, row.kind


def changes(before: list[Any], after: list[Any]) -> dict[str, list[Any]]:
    """Rows that went, came and stayed: equal in module, operation, argument, shape, dtype, bytes and kind.

    A tensor that another operation saves now (first a layer norm, then a checkpoint) went and came.
    """
    counts = Counter(_key(row) for row in after)
    went: list[Any] = []
    stayed: list[Any] = []
    for row in before:
        (stayed if counts[_key(row)] else went).append(row)
        counts[_key(row)] -= 1 if counts[_key(row)] else 0
    left = Counter(_key(row) for row in before)
    came = []
    for row in after:
        if left[_key(row)]:
            left[_key(row)] -= 1
        else:
            came.append(row)
    return {"went": went, "came": came, "stayed": stayed}


def diff_text(before: list[Any], after: list[Any]) -> str:
    """The three lists, each with its bytes; of what stayed, why it is still there, tensor by tensor."""
    sizes = [sum(row.bytes for row in rows) for rows in (before, after)]
    parts = [f"{sizes[0]:,} B before, {sizes[1]:,} B after: {sizes[1] - sizes[0]:+,} B"]
    lists = changes(before, after)
    for name in ("went", "came"):
        rows = lists[name]
        parts.append(_head(name, rows) + (f"\n{_table(rows)}" if rows else ""))
    stayed = lists["stayed"]
    parts.append(_head("stayed", stayed) + _in_inputs(stayed))
    if stayed:
        on = "recomputation is on, and these are still there because" if runs_again(after) else "still there because"
        parts[-1] += f": {on}"
    by_reason: dict[str, list[Any]] = {}
    for row in stayed:
        by_reason.setdefault(reason_of(row), []).append(row)
    for reason, rows in sorted(by_reason.items(), key=lambda item: -sum(row.bytes for row in item[1])):
        parts[-1] += f"\n… {reason}: {sum(row.bytes for row in rows):,} B\n{_table(rows)}"
    return "\n\n".join(parts)


def _head(name: str, rows: list[Any]) -> str:
    return f"{name}: {len(rows)} tensors, {sum(row.bytes for row in rows):,} B"


def _table(rows: list[Any]) -> str:
    return aligned(HEADINGS, lines_of(fold(rows)))


def _in_inputs(rows: list[Any]) -> str:
    """The bytes in the paper's unit, where an input ``[s, b, h]`` is among the rows: bytes for each of its elements."""
    shape = next((row.shape for row in rows if row.kind == "input" and len(row.shape) == 3), None)
    if shape is None or not prod(shape):
        return ""
    return f" = {sum(row.bytes for row in rows) / prod(shape):.4g} sbh"


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
