"""Find saved tensors that a small change of the model's code avoids, and compare two recorded runs.

Each kind of waste has a rule that finds it among a ledger's rows.  A rule looks at which operation made a tensor and
which one reads it (``ledger.provenance``), and never at the shape alone: a square image also has an s × s shape, and
is no attention mask.

``actmem diff a.json b.json`` compares two files that ``actmem record --json`` wrote, and prints which saved tensors
are gone, which are new, and which are the same.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmem.config import ConfigError
from actmem.ledger.ledger_tables import SavedTensor, rows_of_file, rows_text
from actmem_tools.command_line import Parser

Rows = list[SavedTensor]


@dataclass(frozen=True)
class Finding:
    """Saved tensors that a change of the code would avoid or shrink.

    Attributes:
        waste: the name of this kind of waste, such as "repeated K and V".
        bytes: how many bytes fewer are saved for backward after the change of the code.
        floor: how many bytes of these tensors are still saved after the change.
        text: one or two sentences for the user: what is saved now, and what to change.
    """

    waste: str
    bytes: int
    floor: int
    text: str


def findings(rows: Iterable[SavedTensor]) -> list[Finding]:
    """Return a Finding for every known kind of waste among saved tensors.

    Args:
        rows: one row for each saved tensor, from ``Ledger.tensors``.

    Returns: the findings whose change would free any bytes, the largest first.  Two findings can count the same tensor.
    """
    rows = [row for row in rows if row.bytes]
    wastes = []
    for waste, rule, floor_of, text in _RULES:
        kept = rule(rows)
        floor = floor_of(kept)
        here = [row for row in kept if row.device == "cpu" and row.op in _FUSED_ON_GPUS]
        wastes.append(Finding(waste, _size(kept) - floor, floor, text + (_ON_CPU if here and here == kept else "")))
    return sorted((finding for finding in wastes if finding.bytes), key=lambda finding: -finding.bytes)


def _size(rows: Rows) -> int:
    return sum(row.bytes for row in rows)


def _by_module(rows: Rows) -> list[Rows]:
    groups: dict[str, Rows] = {}
    for row in rows:
        groups.setdefault(row.module, []).append(row)
    return list(groups.values())


def _is(row: SavedTensor, *dtypes: str) -> bool:
    return str(row.dtype).endswith(dtypes)


def _each(is_waste: Callable[[SavedTensor], bool]) -> Callable[[Rows], Rows]:
    """Make a rule out of a condition on one row."""
    return lambda rows: [row for row in rows if is_waste(row)]


#: Operations for which a CPU runs several kernels and a GPU one: attention if it has dropout, RMSNorm always.
_FUSED_ON_GPUS = ("scaled_dot_product_attention", "rms_norm")
_ON_CPU = " Recorded on a CPU; a GPU may save less."
_MATMUL = ("matmul", "bmm", "baddbmm", "__matmul__", "einsum")


def _gelu(rows: Rows) -> Rows:
    """Find the tensors saved by a GELU that is written as several operations."""
    kept = []
    for group in _by_module(rows):
        elementwise = [row for row in group if row.op in ("tanh", "pow", "mul", "add", "erf", "div")]
        shapes = {row.shape for row in elementwise if row.op == "mul" and row.made_by.startswith("a number plus ")}
        of_gelu = [row for row in elementwise if row.shape in shapes]
        if {"erf", "pow"} & {row.op for row in of_gelu}:
            kept += of_gelu
    return kept


def _norm(rows: Rows) -> Rows:
    """Find the float32 tensors saved by norms that make a float32 copy of their 16-bit input."""
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
    """Make a rule that finds results of an activation function, saved by a product, whose inputs are saved too.

    Args:
        activation: the function's name, "silu" or "gelu".
    """

    def rule(rows: Rows) -> Rows:
        inputs = {(row.shape, row.dtype) for row in rows if row.op == activation}
        results = [row for row in rows if row.made_by == activation and row.op in ("mul", "__mul__")]
        return [row for row in results if (row.shape, row.dtype) in inputs]

    return rule


def _nothing(rows: Rows) -> int:
    return 0


_OF_GATES = (
    "The activation's result is kept for the product, and its input too; a function of both keeps the inputs and makes "
    "it again."
)
#: Of each waste: its name, the rule that finds its rows, the bytes of those rows that are still saved after the change,
#: and the text of its ``Finding``.
_RULES: tuple[tuple[str, Callable[[Rows], Rows], Callable[[Rows], int], str], ...] = (
    ("GeLU in several operations", _gelu,
     lambda rows: sum(max(row.bytes for row in group) for group in _by_module(rows)),
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
    """Run ``actmem diff BEFORE AFTER``: print the differences between the saved tensors of two ``actmem record`` runs.

    Args:
        argv: what follows ``actmem diff``: the paths of two files that ``actmem record --json FILE`` wrote.

    Returns: the exit code: 0, or 2 after one line of error on bad input.
    """
    parser = Parser("diff", "Compare two files of `record --json FILE`.")
    parser.add_argument("before")
    parser.add_argument("after")

    def run(options: Any) -> int:
        print(diff_text(_read(options.before), _read(options.after)))
        return 0

    return parser.run(argv, run)


def _read(path: str) -> Rows:
    try:
        return rows_of_file(json.loads(Path(path).read_text(encoding="utf-8"))["rows"])
    except OSError as error:
        raise ConfigError(path, error.strerror or "can't be read") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(path, "is no file of `actmem record … --json FILE`") from error


def _key(row: SavedTensor) -> tuple:
    return row.module, row.op, row.argument, row.shape, row.dtype, row.bytes, row.kind


def _without(rows: Rows, others: Rows) -> Rows:
    """Return the rows that have no equal among ``others``; each of ``others`` is the equal of at most one row."""
    left = Counter(map(_key, others))
    rest = []
    for row in rows:
        left[_key(row)] -= 1
        if left[_key(row)] < 0:
            rest.append(row)
    return rest


def diff_text(before: Rows, after: Rows) -> str:
    """Return text that lists the saved tensors that are gone, new and unchanged between two recorded runs.

    Two rows are the same tensor if they agree in module, operation, argument, shape, dtype, bytes and kind.  So a
    tensor that a layer norm saved before and a checkpoint saves now is listed twice, as gone and as new.

    Args:
        before: the saved tensors of one run.
        after: the saved tensors of the other run.

    Returns: a line with the total bytes before and after, then the lists "went" (gone), "came" (new) and "stayed"
        (unchanged) with the bytes of each tensor.
    """
    sizes = _size(before), _size(after)
    parts = [f"{sizes[0]:,} B before, {sizes[1]:,} B after: {sizes[1] - sizes[0]:+,} B"]
    went, came = _without(before, after), _without(after, before)
    for name, rows in (("went", went), ("came", came), ("stayed", _without(before, went))):
        head = f"{name}: {len(rows)} tensors, {_size(rows):,} B"
        parts.append(head + (f"\n{rows_text(rows, len(rows))}" if rows else ""))
    return "\n\n".join(parts)
