"""``python -m actmem diff a.json b.json``: which tensors came, went and stayed between two records."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from actmem.config import ConfigError
from actmem.measure.fold import fold
from actmem.measure.ledger_tables import HEADINGS, aligned, lines_of
from actmem.measure.stay_reasons import reason_of, runs_again


class _Row:
    """A row of a file, as ``fold`` reads it."""

    def __init__(self, row: dict[str, Any]):
        self.module, self.op, self.argument = row["module"], row["op"], row.get("argument", "")
        self.shape, self.dtype, self.bytes, self.kind = tuple(row["shape"]), row["dtype"], row["bytes"], row["kind"]
        self.held_by = row.get("held_by", "")

    @property
    def key(self) -> tuple:
        return self.module, self.op, self.argument, self.shape, self.dtype, self.bytes, self.kind


def main(argv: list[str]) -> int:
    """Run the command; 2 and one line on bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m actmem diff", description="Compare two files of `record --json FILE`."
    )
    parser.add_argument("before")
    parser.add_argument("after")
    options = parser.parse_args(argv)
    try:
        print(diff_text(_read(options.before), _read(options.after)))
    except ConfigError as error:
        print(f"actmem diff: {error}", file=sys.stderr)
        return 2
    return 0


def _read(path: str) -> list[_Row]:
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        return [_Row(row) for row in result["rows"]]
    except OSError as error:
        raise ConfigError(path, error.strerror or "can't be read") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(path, "is no file of `python -m actmem record … --json FILE`") from error


def changes(before: list[_Row], after: list[_Row]) -> dict[str, list[_Row]]:
    """Rows that went, came and stayed: equal in module, operation, argument, shape, dtype, bytes and kind.

    A tensor that another operation saves now (first a layer norm, then a checkpoint) went and came.
    """
    counts = Counter(row.key for row in after)
    went: list[_Row] = []
    stayed: list[_Row] = []
    for row in before:
        (stayed if counts[row.key] else went).append(row)
        counts[row.key] -= 1 if counts[row.key] else 0
    left = Counter(row.key for row in before)
    came = []
    for row in after:
        if left[row.key]:
            left[row.key] -= 1
        else:
            came.append(row)
    return {"went": went, "came": came, "stayed": stayed}


def diff_text(before: list[_Row], after: list[_Row]) -> str:
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
    by_reason: dict[str, list[_Row]] = {}
    for row in stayed:
        by_reason.setdefault(reason_of(row), []).append(row)
    for reason, rows in sorted(by_reason.items(), key=lambda item: -sum(row.bytes for row in item[1])):
        parts[-1] += f"\n… {reason}: {sum(row.bytes for row in rows):,} B\n{_table(rows)}"
    return "\n\n".join(parts)


def _head(name: str, rows: list[_Row]) -> str:
    return f"{name}: {len(rows)} tensors, {sum(row.bytes for row in rows):,} B"


def _table(rows: list[_Row]) -> str:
    return aligned(HEADINGS, lines_of(fold(rows)))


def _in_inputs(rows: list[_Row]) -> str:
    """The bytes in the paper's unit, where an input ``[s, b, h]`` is among the rows: bytes for each of its elements."""
    shape = next((row.shape for row in rows if row.kind == "input" and len(row.shape) == 3), None)
    if shape is None or not prod(shape):
        return ""
    return f" = {sum(row.bytes for row in rows) / prod(shape):.4g} sbh"
