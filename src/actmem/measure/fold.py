"""Rows of repeated layers as one: ``layers.0-79.mlp ×80``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Folded:
    """Equal rows of repeated modules.  row: the first of them.  module: with ranges for the numbers.  bytes: of all."""

    module: str
    row: Any
    count: int
    bytes: int


def fold(rows: Iterable[Any]) -> list[Folded]:
    """Rows that differ only in the numbers of their module's name as one, the largest first.

    Each row has module, op, argument, shape, dtype, bytes and kind.
    """
    groups: dict[tuple, list] = {}
    for row in rows:
        pattern = _NUMBER.sub("*", row.module)
        key = (pattern, row.op, row.argument, tuple(row.shape), str(row.dtype), row.bytes, row.kind)
        groups.setdefault(key, []).append(row)
    folded = [
        Folded(folded_name([row.module for row in group]), group[0], len(group), sum(row.bytes for row in group))
        for group in groups.values()
    ]
    return sorted(folded, key=lambda one: -one.bytes)


def folded_name(names: list[str]) -> str:
    """Names that differ only in their numbers, as one name: ``layers.0-3.norm``, or ``layers.0,2.norm``."""
    columns = zip(*(map(int, _NUMBER.findall(name)) for name in names))
    ranges = iter([_range(sorted(set(column))) for column in columns])
    return _NUMBER.sub(lambda _: next(ranges), names[0])


def _range(numbers: list[int]) -> str:
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
    shown = ",".join(map(str, numbers[:4]))
    return shown if len(numbers) <= 4 else f"{shown},…{numbers[-1]}"
