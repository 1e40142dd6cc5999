"""Which rank's experts take which tokens, and the exchange of the tokens' rows.

Each token goes to κ experts: sb·κ pairs of a token and an expert.  A rank holds E/t experts whole.
Under sequence parallelism it routes its own tokens, and an all-to-all brings each pair's row to the
rank of its expert and back.  Without it every rank has every token, takes the pairs of its own experts,
and the ranks add what they found.  No pair is dropped, so ranks hold as much as the router sends them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from actmem.parallel.collectives import all_gather
from actmem.parallel.groups import TensorParallel


@dataclass(frozen=True)
class Dispatch:
    """Who sends how many pairs to which expert.  counts: for each rank that sends, its pairs by expert."""

    tp: TensorParallel
    counts: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(chosen: Tensor, num_experts: int, tp: TensorParallel) -> Dispatch:
        """The router's choice, ``[s/t, b, κ]`` or ``[s, b, κ]``: every rank learns every rank's counts."""
        own = torch.bincount(chosen.flatten(), minlength=num_experts)
        every = all_gather(own[None], tp) if tp.sequence_parallel else own[None]
        return Dispatch(tp, tuple(tuple(counts) for counts in every.tolist()))

    @property
    def _first(self) -> int:
        return self.tp.rank * self._held

    @property
    def _held(self) -> int:
        return len(self.counts[0]) // self.tp.size

    @property
    def received(self) -> list[tuple[int, ...]]:
        """Pairs for this rank's experts, by sender."""
        return [counts[self._first : self._first + self._held] for counts in self.counts]

    @property
    def by_expert(self) -> list[int]:
        """Pairs of each of this rank's experts."""
        return [sum(of_expert) for of_expert in zip(*self.received)]

    def to_experts(self, pairs: Tensor, order: Tensor) -> Tensor:
        """Rows ``[pairs here, …]`` to the ranks of their experts, ``[pairs of own experts, …]``, expert by expert.

        order: the pairs sorted by expert.
        """
        pairs = pairs[order]
        if not self.tp.sequence_parallel:
            before = sum(self.counts[0][: self._first])
            return pairs[before : before + sum(self.by_expert)]
        arrived = _all_to_all(pairs, self._sent, [sum(part) for part in self.received], self.tp)
        return _regrouped(arrived, self.received)

    def from_experts(self, rows: Tensor, order: Tensor) -> Tensor:
        """The way back.  Without sequence parallelism: with zeros for the pairs of other ranks' experts."""
        if self.tp.sequence_parallel:
            senders = list(zip(*self.received))  # by expert, then by sender
            rows = _all_to_all(_regrouped(rows, senders), [sum(part) for part in self.received], self._sent, self.tp)
        else:
            before = sum(self.counts[0][: self._first])
            after = len(order) - before - len(rows)
            rows = torch.cat([rows.new_zeros(before, *rows.shape[1:]), rows, rows.new_zeros(after, *rows.shape[1:])])
        back = torch.empty_like(rows)
        back[order] = rows
        return back

    @property
    def _sent(self) -> list[int]:
        """Pairs that this rank sends to each rank."""
        own = self.counts[self.tp.rank]
        return [sum(own[rank * self._held : (rank + 1) * self._held]) for rank in range(self.tp.size)]


def _regrouped(rows: Tensor, blocks: list[tuple[int, ...]]) -> Tensor:
    """Blocks that lie in groups, the first of each group first, then the second of each."""
    parts = iter(rows.split([size for group in blocks for size in group]))
    grouped = [[next(parts) for _ in group] for group in blocks]
    return torch.cat([part for turn in zip(*grouped) for part in turn])


def _all_to_all(rows: Tensor, sent: list[int], received: list[int], tp: TensorParallel) -> Tensor:
    """Rows in the order of their receivers out, in the order of their senders in."""
    if tp.size == 1:
        return rows
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=tp.group)
    return result
