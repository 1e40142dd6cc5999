"""What a ledger's rows tell: known wastes, why each row is kept, and what came and went between two records.

A rule looks at what made a tensor and what reads it, as ``ledger.provenance`` followed them, never at a shape alone: a
square picture is no attention.  Bytes are those of the rows found; the floor is what the change leaves of them.

``actmem diff a.json b.json``: which tensors came, went and stayed between two files of ``record``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any

from actmem.config import ConfigError
from actmem.ledger.ledger_tables import SavedTensor, rows_of_file, rows_text
from actmem_tools.command_line import Parser
from actmem_tools.snapshot import GRAIN_BYTES, is_snapshot, read_snapshot

Rows = list[SavedTensor]


@dataclass(frozen=True)
class Finding:
    """One waste.  bytes: what could go.  floor: what stays of these rows.  text: what is kept, and the change."""

    waste: str
    bytes: int
    floor: int
    text: str


def findings(rows: Iterable[SavedTensor]) -> list[Finding]:
    """All wastes found in a ledger's ``tensors``, the largest first; a row can be in two of them."""
    rows = [row for row in rows if row.bytes]
    found = []
    for waste, rule, floor_of, text in _RULES:
        kept = rule(rows)
        floor = floor_of(kept)
        here = [row for row in kept if row.device == "cpu" and row.op in _FUSED_ON_GPUS]
        found.append(Finding(waste, _size(kept) - floor, floor, text + (_ON_CPU if here and here == kept else "")))
    return sorted((one for one in found if one.bytes), key=lambda one: -one.bytes)


def _size(rows: Rows) -> int:
    return sum(row.bytes for row in rows)


def _by_module(rows: Rows) -> list[Rows]:
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row.module, []).append(row)
    return list(groups.values())


def _is(row: SavedTensor, *dtypes: str) -> bool:
    return str(row.dtype).endswith(dtypes)


def _each(keeps: Callable[[SavedTensor], bool]) -> Callable[[Rows], Rows]:
    """A rule that looks at one row at a time."""
    return lambda rows: [row for row in rows if keeps(row)]


#: A CPU computes these in parts where a GPU has one kernel: the first with dropout, the second always.
_FUSED_ON_GPUS = ("scaled_dot_product_attention", "rms_norm")
_ON_CPU = " Seen on a CPU, whose scaled_dot_product_attention and rms_norm have fewer fused kernels than a GPU's."
_MATMUL = ("matmul", "bmm", "baddbmm", "__matmul__", "einsum")


def _gelu(rows: Rows) -> Rows:
    kept = []
    for group in _by_module(rows):
        of = [row for row in group if row.op in ("tanh", "pow", "mul", "add", "erf", "div")]
        shapes = {row.shape for row in of if row.op == "mul" and row.made_by.startswith("a number plus ")}
        of = [row for row in of if row.shape in shapes]
        if {"erf", "pow"} & {row.op for row in of}:
            kept += of
    return kept


def _norm(rows: Rows) -> Rows:
    """Float32 tensors in norms that are given 16 bits and make a float32 copy."""
    if not any(_is(row, "bfloat16", "float16") for row in rows):
        return []
    kept = []
    for group in _by_module(rows):
        wide = [row for row in group if _is(row, "float32") and row.shape and row.shape[-1] > 1]
        copies = {row.shape for row in wide if row.made_by == "_to_copy"}
        if "norm" in group[0].module.rsplit(".", 1)[-1].lower():
            kept += [row for row in wide if row.shape in copies]
    return kept


def _beside_its_input(activation: str) -> Callable[[Rows], Rows]:
    """A rule for results of an activation that a matmul keeps while the activation keeps its input."""

    def rule(rows: Rows) -> Rows:
        inputs = {(row.shape, row.dtype) for row in rows if row.op == activation}
        results = [row for row in rows if row.made_by == activation and row.op in ("mul", "__mul__")]
        return [row for row in results if (row.shape, row.dtype) in inputs]

    return rule


def _largest(rows: Rows) -> int:
    return max((row.bytes for row in rows), default=0)


def _nothing(rows: Rows) -> int:
    return 0


_OF_GATES = (
    "The activation's result is kept for the product, and its input too; a function of both keeps the inputs and makes "
    "it again."
)
#: The waste, the rows that it keeps, what the change leaves of them, and what to say.
_RULES: tuple[tuple[str, Callable[[Rows], Rows], Callable[[Rows], int], str], ...] = (
    ("GeLU in several operations", _gelu, lambda rows: sum(map(_largest, _by_module(rows))),
     "Each operation keeps its own tensors; F.gelu keeps its input alone."),
    ("norms in float32", _norm, lambda rows: _size(rows) // 2,
     "The norm keeps its input in float32; a fused kernel (nn.RMSNorm on a GPU) keeps it in 16 bits and one number a "
     "token."),
    ("attention that keeps s²",
     _each(lambda row: row.made_by == "attention scores" and min(row.shape[-2:]) > 1), _nothing,
     "Attention is computed by matmuls; a fused kernel keeps Q, K, V, the output and 4 bytes a head and token."),
    ("repeated K and V", _each(lambda row: "repeated" in row.made_by),
     lambda rows: sum(row.bytes // int(row.made_by.rsplit("×", 1)[1]) for row in rows),
     "K and V are copied for each query head; scaled_dot_product_attention(…, enable_gqa=True) reads them as they "
     "are."),
    ("SiLU kept twice", _beside_its_input("silu"), _nothing, _OF_GATES),
    ("GELU kept twice", _beside_its_input("gelu"), _nothing, _OF_GATES),
    ("expert weights copied per token",
     _each(lambda row: row.made_by == "picked from a weight" and row.op in _MATMUL), _nothing,
     "Each token gets a copy of its expert's weights; sort tokens and use a grouped matmul."),
    ("masks of s²", _each(lambda row: row.made_by == "attention mask" and min(row.shape[-2:]) > 1), _nothing,
     "is_causal=True needs no mask, and padding one of [b, 1, 1, s]; a mask added inside the matmul need not be "
     "kept."),
    ("gathered inputs",
     _each(lambda row: row.made_by == "all-gather" and row.kind == "activation" and row.op == "linear"), _nothing,
     "The gathered input is kept on every rank; save the shard and gather again in backward (2205.05198 section "
     "4.2.2)."),
    ("casts of weights",
     _each(lambda row: row.kind == "cast weight" and row.made_by == "_to_copy" and _is(row, "bfloat16", "float16")),
     _nothing,
     "autocast keeps a copy of each weight until backward; hold the weights in 16 bits."),
)  # fmt: skip


def main(argv: list[str]) -> int:
    """Run the command; 2 and one line on bad input."""
    parser = Parser("diff", "Compare two files of `record --json FILE`, or of torch.cuda.memory._dump_snapshot.")
    parser.add_argument("before")
    parser.add_argument("after")

    def run(options: Any) -> int:
        before, after = _read(options.before), _read(options.after)
        was_seen = is_snapshot(options.before), is_snapshot(options.after)
        name = "peak" if all("peak" in result for result in (before, after)) and any(was_seen) else "rows"
        rows = rows_of_file(before[name]), rows_of_file(after[name])
        print(seen_text(*rows, name) if was_seen == (False, True) else diff_text(*rows))
        return 0

    return parser.run(argv, run)


def _read(path: str) -> dict[str, Any]:
    if is_snapshot(path):
        return read_snapshot(path)
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        rows_of_file([*result["rows"], *result.get("peak", ())])  # all fields are there
        return result
    except OSError as error:
        raise ConfigError(path, error.strerror or "can't be read") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(path, "is no file of `actmem record … --json FILE`") from error


def _key(row: SavedTensor) -> tuple:
    return row.module, row.op, row.argument, row.shape, row.dtype, row.bytes, row.kind


def _without(rows: Rows, others: Rows, key: Callable[[SavedTensor], Any] = _key) -> Rows:
    """The rows that have no equal among ``others``, each of which takes one."""
    left = Counter(map(key, others))
    rest = []
    for row in rows:
        left[key(row)] -= 1
        if left[key(row)] < 0:
            rest.append(row)
    return rest


def seen_text(predicted: Rows, seen: Rows, name: str) -> str:
    """Predicted allocations against those that a GPU made, matched by their bytes, which its allocator rounds up.

    name: "peak" if they are those of both peaks, else they are alive at the end.
    """
    predicted = [replace(row, bytes=-(-row.bytes // GRAIN_BYTES) * GRAIN_BYTES) for row in predicted if row.bytes]
    by_bytes = attrgetter("bytes")
    missing, more = _without(predicted, seen, by_bytes), _without(seen, predicted, by_bytes)
    place = "at the peak" if name == "peak" else "at the end"
    parts = [f"{_size(predicted) - _size(missing):,} B are predicted and seen, {place}"]
    for what, rows in (("predicted and not seen", missing), ("seen and not predicted", more)):
        parts.append(
            f"{what}: {len(rows)} allocations, {_size(rows):,} B" + (f"\n{rows_text(rows, len(rows))}" if rows else "")
        )
    return "\n".join(parts)


def diff_text(before: Rows, after: Rows) -> str:
    """What went, came and stayed, each with its bytes; of what stayed, why it is still there, tensor by tensor.

    Rows are equal in module, operation, argument, shape, dtype, bytes and kind.  A tensor that another operation saves
    now (first a layer norm, then a checkpoint) went and came.
    """
    sizes = _size(before), _size(after)
    parts = [f"{sizes[0]:,} B before, {sizes[1]:,} B after: {sizes[1] - sizes[0]:+,} B"]
    went, came = _without(before, after), _without(after, before)
    for name, rows in (("went", went), ("came", came)):
        parts.append(_head(name, rows) + (f"\n{rows_text(rows, len(rows))}" if rows else ""))
    stayed = _without(before, went)
    parts.append(_head("stayed", stayed) + _in_inputs(stayed))
    if stayed:
        on = "recomputation is on, and these are still there because" if runs_again(after) else "still there because"
        parts[-1] += f": {on}"
    by_reason: dict[str, Rows] = {}
    for row in stayed:
        by_reason.setdefault(reason_of(row), []).append(row)
    for reason, rows in sorted(by_reason.items(), key=lambda item: -_size(item[1])):
        parts[-1] += f"\n… {reason}: {_size(rows):,} B\n{rows_text(rows, len(rows))}"
    return "\n\n".join(parts)


def _head(name: str, rows: Rows) -> str:
    return f"{name}: {len(rows)} tensors, {_size(rows):,} B"


def _in_inputs(rows: Rows) -> str:
    """The bytes in the paper's unit, where an input ``[s, b, h]`` is among the rows: bytes for each of its elements."""
    shape = next((row.shape for row in rows if row.kind == "input" and len(row.shape) == 3), None)
    if shape is None or not prod(shape):
        return ""
    return f" = {_size(rows) / prod(shape):.4g} sbh"


_MASK = "backward drops the same elements, by this mask"
_SECOND_RUN = "a second run in backward starts from it"
_FUSED = (
    "scaled_dot_product_attention",
    *(f"_scaled_dot_product_{kernel}_attention" for kernel in ("flash", "cudnn", "efficient")),
    "flash_attn_func",
)
_CHECKPOINTS = ("checkpoint", "CheckpointFunction")
#: Operations by name, and why each keeps what it keeps.
_REASONS = (
    (("linear", "addmm", "_ColumnParallel", "conv1d", "conv2d"),
     "the gradient of a weight is computed from the layer's input"),
    (("layer_norm", "rms_norm", "group_norm", "batch_norm"),
     "the gradient of a norm is computed from its input and its statistics"),
    (("softmax", "log_softmax", "sigmoid", "tanh", "exp", "rsqrt", "sqrt"),
     "this operation's gradient is computed from its own result"),
    (("gelu", "silu", "relu", "leaky_relu", "pow", "square", "sin", "cos", "log"),
     "this activation's gradient is computed from its input"),
    (("dropout", "native_dropout"), _MASK),
    (("embedding",), "the gradient of the table needs the ids"),
    (("cross_entropy", "nll_loss", "cross_entropy_loss"),
     "the loss's gradient is computed from the probabilities and the targets"),
    ("bmm baddbmm matmul mm __matmul__ einsum mul __mul__ __rmul__ div __truediv__".split(),
     "the gradient of each factor is computed from the other one"),
    (_FUSED, "a fused kernel makes the scores again from Q, K and V, and keeps its output to do so"),
    (_CHECKPOINTS, "a checkpoint runs its region again from its inputs"),
)  # fmt: skip
_OF_KIND = {
    "generator state": "the second run draws the same dropout from it",
    "cast weight": "backward reads the weight in the dtype in which the product ran",
    "gathered weight": "the weight was gathered for forward and not freed after it",
}


def reason_of(row: SavedTensor) -> str:
    """One clause on why ``row`` is kept for backward."""
    if row.kind in _OF_KIND:
        return _OF_KIND[row.kind]
    if row.held_by:
        return f"{row.held_by} holds it, whatever autograd does"
    if row.op == "_Keep":
        is_mask = "bool" in str(row.dtype) and row.kind == "activation"
        return _MASK if is_mask else _SECOND_RUN
    return next((reason for names, reason in _REASONS if row.op in names), f"{row.op or 'an operation'} saves it")


def runs_again(rows: Iterable[SavedTensor]) -> bool:
    """True if one of ``rows`` is there for a second run: recomputation is on."""
    return any(reason_of(row) in (_OF_KIND["generator state"], _SECOND_RUN, _REASONS[-1][1]) for row in rows)
