"""Simulate a ring collective step by step.

A tensor is split into t chunks.  In each step every rank sends one chunk to the next rank on the ring, all at once.
The first t − 1 steps add up: chunk c starts on rank c + 1 and collects every rank's contribution on its way to rank c.
The other t − 1 steps pass the finished chunks around.  ``PredictedCollective.wire_bytes`` has the closed form of the
bytes counted here.
"""

import math
from dataclasses import dataclass

from actmem.config import check_choice, check_size

#: The halves of each collective, in order.
PHASES = {
    "reduce-scatter": ("reduce-scatter",),
    "all-gather": ("all-gather",),
    "all-reduce": ("reduce-scatter", "all-gather"),
}

#: The most ranks, because all chunks of all ranks are listed after each step.
LARGEST_RING = 128


@dataclass(frozen=True)
class RingState:
    """The state of all ranks after one step of a ring collective.

    Attributes:
        step: How many steps have run.
        phase: "reduce-scatter" or "all-gather", the half of the collective that the step belongs to; "" before the
            first step.
        held: ``held[rank][chunk]`` is the set of ranks whose values are added up in this rank's copy of the chunk; it
            is empty if the rank has no copy.
        received: ``received[rank]`` is the chunk that the rank received in this step; None before the first step.
        sent_bytes: Bytes that each rank has sent so far.
    """

    step: int
    phase: str
    held: tuple[tuple[frozenset[int], ...], ...]
    received: tuple[int | None, ...]
    sent_bytes: int

    def complete(self, rank: int, chunk: int) -> bool:
        """Return whether the copy of chunk ``chunk`` on rank ``rank`` is the sum over all ranks."""
        return len(self.held[rank][chunk]) == len(self.held)


def ring(kind: str, ranks: int, payload_bytes: int) -> list[RingState]:
    """Simulate one ring collective, and return its state before the first step and after every step.

    An all-reduce takes 2(t − 1) steps; a reduce-scatter and an all-gather take t − 1. An all-gather starts where a
    reduce-scatter ends: rank r has the finished chunk r and no other chunk. The size of a chunk is the payload divided
    by t, rounded up.

    Args:
        kind: the collective: "reduce-scatter", "all-gather" or "all-reduce".
        ranks: t, at most LARGEST_RING.
        payload_bytes: bytes of the unsharded tensor.

    Raises: ConfigError on another kind, or if a number is out of range.
    """
    check_choice("kind", kind, PHASES)
    t = check_size("ranks", ranks, largest=LARGEST_RING)
    check_size("payload_bytes", payload_bytes, math.inf, least=0)
    chunk_bytes = -(-payload_bytes // t)
    every = frozenset(range(t))
    held = [[frozenset({rank}) for _ in range(t)] for rank in range(t)]
    if kind == "all-gather":
        held = [[every if chunk == rank else frozenset() for chunk in range(t)] for rank in range(t)]
    states = [RingState(0, "", tuple(map(tuple, held)), (None,) * t, 0)]
    for phase in PHASES[kind]:
        for round_ in range(t - 1):
            before = states[-1].held
            received: list[int] = []
            for receiver in range(t):
                sender = (receiver - 1) % t
                chunk = (sender - round_ - (phase == "reduce-scatter")) % t
                arriving = before[sender][chunk]
                # Reducing adds what the receiver had; gathering replaces it.
                held[receiver][chunk] = arriving | before[receiver][chunk] if phase == "reduce-scatter" else arriving
                received.append(chunk)
            step = states[-1].step + 1
            states.append(RingState(step, phase, tuple(map(tuple, held)), tuple(received), step * chunk_bytes))
    return states
