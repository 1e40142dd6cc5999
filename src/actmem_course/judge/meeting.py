"""One collective among virtual ranks: the ranks' inputs, their outputs, and the message if the calls don't match."""

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
#: Stands for a collective where a rank waits for others after it has left the learner's function.
RETURNED = "returned"


def name_of(op: Any) -> str:
    """Return the name of a reduction: "SUM".

    Args:
        op: the reduction: a ``ReduceOp`` of torch.distributed, such as ``ReduceOp.SUM``.
    """
    return getattr(getattr(op, "op", op), "name", "")


def reduced(parts: list[Tensor], op: Any) -> Tensor:
    """Reduce the ranks' tensors to one tensor.

    Args:
        parts: the tensor of each rank.
        op: the reduction, such as ``ReduceOp.SUM``.
    """
    total = reduce(_REDUCE[name_of(op)], parts)
    return total / len(parts) if name_of(op) == "AVG" else total


@dataclass
class Meeting:
    """One collective of one group, for which each rank waits until all ranks have called it.

    Attributes:
        size: how many ranks must call the collective.
        make: computes the collective: takes the ranks' inputs in a list, returns the ranks' outputs in a list.
        brought: each rank's input tensors, by its number in the group.
        calls: each rank's call, by its number in the group: kind of collective, number of elements, dtype, further
            arguments, and the line of code.
        made: each rank's output; None until all ranks have called.
        wrong: the exception that every rank raises if the ranks' calls don't match.
    """

    size: int
    make: Callable[[list], list]
    brought: dict[int, Any] = field(default_factory=dict)
    calls: dict[int, tuple] = field(default_factory=dict)
    made: list | None = None
    wrong: OutOfStep | None = None

    @property
    def over(self) -> bool:
        """Whether all ranks have called the collective."""
        return self.made is not None or self.wrong is not None

    def join(self, rank: int, call: tuple, brought: Any, numbers: Sequence[int]) -> None:
        """Record one rank's call.  The call of the last rank computes the outputs of all.

        Args:
            rank: the rank's number in the group.
            call: the rank's call: a tuple of kind of collective, number of elements, dtype, further arguments, and the
                line of code.
            brought: the rank's input tensors.
            numbers: the numbers of the group's ranks among all ranks, for the message if calls don't match.
        """
        self.brought[rank], self.calls[rank] = brought, call
        if len(self.calls) < self.size:
            return
        if len({call[:-1] for call in self.calls.values()}) > 1:
            self.wrong = OutOfStep(mismatch({numbers[k]: call for k, call in self.calls.items()}))
        else:
            with no_dispatch_modes(), torch.no_grad():
                self.made = self.make([self.brought[k] for k in range(self.size)])
        self.brought.clear()


def mismatch(calls: dict[int, tuple]) -> str:
    """Return a message that says how the ranks' calls of one collective differ: in kind, arguments or tensors.

    Args:
        calls: each rank's call, by the rank's number: a tuple of kind of collective, number of elements, dtype, further
            arguments, and line.  At least two calls differ.
    """
    if len({call[0] for call in calls.values()}) > 1:
        return deadlock(calls)
    kind, *_, line = calls[min(calls)]
    if len({call[1:3] for call in calls.values()}) == 1:
        arguments = "; ".join(f"rank {r} with {', '.join(map(str, call[3]))}" for r, call in sorted(calls.items()))
        return f"the ranks meet in {kind} with different arguments: {arguments} ({line})"
    sizes = "; ".join(f"rank {r} hands it {call[1]:,} elements of {call[2]}" for r, call in sorted(calls.items()))
    return f"the ranks meet in {kind} with tensors that do not fit: {sizes} ({line})"


def deadlock(calls: dict[int, tuple]) -> str:
    """Return a message that says in which collective each rank waits, when all ranks wait and none can continue.

    Args:
        calls: by the rank's number, a tuple whose first item is the kind of collective, and whose last item is the line
            of code that called it.
    """
    ranks_at: dict[tuple[str, str], list[int]] = {}
    for rank, (kind, *_, line) in sorted(calls.items()):
        ranks_at.setdefault((kind, line), []).append(rank)
    return "deadlock: " + "; ".join(_doing(kind, line, ranks) for (kind, line), ranks in ranks_at.items())


def list_of_ranks(ranks: Sequence[int]) -> str:
    """Return a text with the numbers of some ranks: "rank 1", "ranks 0, 2"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _doing(kind: str, line: str, ranks: list[int]) -> str:
    who = list_of_ranks(ranks)
    if kind == RETURNED:
        return f"{who} {'have' if len(ranks) > 1 else 'has'} returned"
    return f"{who} {'are' if len(ranks) > 1 else 'is'} waiting in {kind}" + (f" ({line})" if line else "")
