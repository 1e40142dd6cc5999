"""What is wrong with the order of a rank's forwards or backwards, whatever comes between them."""

from __future__ import annotations

from actmem.formulas.schedule import Action, Schedule


def explain_order(ranks: Schedule, ours: Schedule, kinds: str = "FB") -> str:
    """The first mistake in the order of forwards (F) or backwards (B); nothing if every rank has ours.

    A rank that lacks a pass is left out.
    """
    for kind in kinds:
        for rank, (own, right) in enumerate(zip(ranks, ours)):
            found, wanted = ([a for a in actions if a.kind == kind] for actions in (own, right))
            if found == wanted or len(found) != len(wanted) or set(found) != set(wanted):
                continue
            right_until = next(i for i, pair in enumerate(zip(found, wanted)) if pair[0] != pair[1])
            if kind == "B" and right_until and found[right_until:] == wanted[right_until:][::-1]:
                return f"the last backwards run in reverse: rank {rank} starts them with {found[right_until]}, not with {wanted[right_until]}"
            return _explain(found, wanted, rank, len(ranks))
    return ""


def _explain(found: list[Action], wanted: list[Action], rank: int, p: int) -> str:
    """Why all forwards of a rank, or all its backwards, are in a wrong order."""
    what = "forwards" if found[0].kind == "F" else "backwards"
    chunks = list(dict.fromkeys(a.chunk for a in wanted))
    if found[0].chunk != chunks[0]:
        return f"{what} begin with chunk {chunks[0]}, not with chunk {found[0].chunk}"
    microbatches = [a.microbatch for a in found if a.chunk == chunks[0]]
    if len(microbatches) > 1 and microbatches == sorted(microbatches, reverse=True):
        return (
            "backwards run in the order of the forwards, not the other way round"
            if what == "backwards"
            else "forwards begin with microbatch 0"
        )
    if len(chunks) == 1:
        return f"rank {rank} runs its {what} in another order than 0, 1, 2 and so on"
    asked = f"{p} microbatches go through chunk {chunks[0]} first, then the same {p} through chunk {chunks[1]}"
    if found == sorted(wanted, key=lambda a: (a.microbatch, chunks.index(a.chunk))):
        return f"the {what} take each microbatch through all chunks before the next one: {asked}"
    if found == sorted(wanted, key=lambda a: (chunks.index(a.chunk), a.microbatch)):
        return f"the {what} take all microbatches through chunk {chunks[0]} before any goes through chunk {chunks[1]}: {asked}"
    return f"rank {rank} runs its {what} in another order: {asked}"
