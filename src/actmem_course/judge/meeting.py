"""Where virtual ranks meet: what each brings and takes away, and what is said if they do different things."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from actmem.torch_private import no_dispatch_modes
from actmem_course.judge.verdict import OutOfStep

_REDUCE: dict[str, Any] = {
    "SUM": torch.add, "AVG": torch.add, "MAX": torch.maximum, "MIN": torch.minimum, "PRODUCT": torch.mul,
    "BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip
#: What a rank waits in when it has left the learner's function.
RETURNED = "returned"


def name_of(op: Any) -> str:
    return getattr(getattr(op, "op", op), "name", "")


def reduced(parts: list[Tensor], op: Any) -> Tensor:
    total = reduce(_REDUCE[name_of(op)], parts)
    return total / len(parts) if name_of(op) == "AVG" else total


@dataclass
class Meeting:
    """One collective of one group: what each rank brought, and what each takes away.

    said: by rank of the group, what it is about to do; if these differ, ``wrong`` is raised on every rank.
    """

    size: int
    make: Callable[[list], list]
    brought: dict[int, Any] = field(default_factory=dict)
    said: dict[int, tuple] = field(default_factory=dict)
    made: list | None = None
    wrong: OutOfStep | None = None

    @property
    def over(self) -> bool:
        return self.made is not None or self.wrong is not None

    def join(self, rank: int, said: tuple, brought: Any, numbers: Sequence[int]) -> None:
        """A rank comes.  numbers: those of the group's ranks among all."""
        self.brought[rank], self.said[rank] = brought, said
        if len(self.said) < self.size:
            return
        if len({one[:-1] for one in self.said.values()}) > 1:
            self.wrong = OutOfStep(mismatch({numbers[k]: one for k, one in self.said.items()}))
        else:
            with no_dispatch_modes(), torch.no_grad():
                self.made = self.make([self.brought[k] for k in range(self.size)])
        self.brought.clear()


def mismatch(said: dict[int, tuple]) -> str:
    """What ranks that meet do, in words.  said: kind, elements, dtype, more, and the line."""
    if len({one[0] for one in said.values()}) > 1:
        return deadlock(said)
    kind, *_, line = said[min(said)]
    if len({one[1:3] for one in said.values()}) == 1:
        others = "; ".join(f"rank {r} with {', '.join(map(str, one[3]))}" for r, one in sorted(said.items()))
        return f"the ranks meet in {kind} with different arguments: {others} ({line})"
    sizes = "; ".join(f"rank {r} hands it {one[1]:,} elements of {one[2]}" for r, one in sorted(said.items()))
    return f"the ranks meet in {kind} with tensors that do not fit: {sizes} ({line})"


def deadlock(said: dict[int, tuple]) -> str:
    """What each rank waits in, in words.  said: kind first, and the line last."""
    same: dict[tuple[str, str], list[int]] = {}
    for rank, (kind, *_, line) in sorted(said.items()):
        same.setdefault((kind, line), []).append(rank)
    return "deadlock: " + "; ".join(_doing(kind, line, ranks) for (kind, line), ranks in same.items())


def list_of_ranks(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _doing(kind: str, line: str, ranks: list[int]) -> str:
    who = list_of_ranks(ranks)
    if kind == RETURNED:
        return f"{who} {'have' if len(ranks) > 1 else 'has'} returned"
    return f"{who} {'are' if len(ranks) > 1 else 'is'} waiting in {kind}" + (f" ({line})" if line else "")
