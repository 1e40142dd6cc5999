"""V-Min and V-Half: V-shaped schedules whose every rank holds about a third and a half of 1F1B's rank 0.

A building block is the six actions of one microbatch on one rank (F, B and W of two chunks), at fixed times in units
of one action.  Repeated every six units, it fills the rank without gaps, if no two of its times are equal modulo 6.
What a rank holds is how long a block's chunks live, over 6.  On a V, the rank that keeps chunk 0 longest keeps
chunk 1 shortest, so the sum can be the same on all.  Timelines of both need ``v_shaped=True``.
Source: 2405.15362 sections 3 and 4, for a microbatch's block and the peak; the times are our own.
"""

from __future__ import annotations

from dataclasses import dataclass

from actmem.formulas.schedule import Action, Schedule, check_schedule_length

_INTERVAL = 6  # actions of one microbatch on one rank


@dataclass(frozen=True)
class _Block:
    """Times of one microbatch's passes on rank r: F of chunk 0 at down·r, F of chunk 1 at turn − r, and so on.

    Going down the V a step takes ``down`` units; going up it takes 1.
    """

    down: int
    turn: int  # the first rank's F of chunk 1
    back: int  # its B of chunk 1
    end: int  # its B of chunk 0

    def times(self, rank: int) -> dict[tuple[str, int], int]:
        """When each (kind, chunk) runs; each "W" in the first free place of its interval after its "B"."""
        at = {
            ("F", 0): self.down * rank,
            ("F", 1): self.turn - rank,
            ("B", 1): self.back + self.down * rank,
            ("B", 0): self.end - rank,
        }
        taken = {time % _INTERVAL for time in at.values()}
        for chunk in (1, 0):
            time = next(t for t in range(at["B", chunk] + 1, at["B", chunk] + _INTERVAL) if t % _INTERVAL not in taken)
            at["W", chunk] = time
            taken.add(time % _INTERVAL)
        return at


def v_min(pipeline_parallel_size: int, num_microbatches: int) -> Schedule:
    """V-Min: each pass follows its neighbour's at once, so a microbatch lives 4p units: peak 2⌊(p + 4)/3⌋ chunks.

    Chunks are half of 1F1B's stages, whose rank 0 holds 2p of them.  Idle 4p − 5 units of one action, 2 more
    if 3 divides p (1F1B: 6(p − 1)).  Only while F, B and W take equally long.
    """
    p = pipeline_parallel_size
    # The turn at rank 0 must not fall on the same unit of the interval as rank 0's first forward.
    back = 2 * p + (2 if p % 3 == 0 else 0)
    return _repeated(_Block(1, 2 * p - 1, back, back + 2 * p - 1), p, num_microbatches)


def v_half(pipeline_parallel_size: int, num_microbatches: int) -> Schedule:
    """V-Half: two units a step down, one a step up, so a microbatch lives 6p units: peak 2⌊(p + 2)/2⌋ chunks.

    Idle (7p − 9)/2 units for an odd p, (7p − 8)/2 for an even one: 7/12 of 1F1B's 6(p − 1).  The paper then
    moves each "W" of the last phase into a gap, which brings it near a half; this order does not.
    """
    p = pipeline_parallel_size
    late, rest = (0, 0) if p % 2 else (2, 4)
    turn = 3 * p - 1 + late
    return _repeated(_Block(2, turn, turn + 1, turn + 3 * p - 1 + rest), p, num_microbatches)


def _repeated(block: _Block, p: int, n: int) -> Schedule:
    """The blocks of n microbatches, one every interval, as each rank's order of actions."""
    check_schedule_length(2 * p * n)
    ranks = []
    for rank in range(p):
        times = [
            (time + _INTERVAL * i, Action(kind, rank, chunk, i))
            for (kind, chunk), time in block.times(rank).items()
            for i in range(n)
        ]
        ranks.append([action for _, action in sorted(times, key=lambda one: one[0])])
    return ranks
