"""Pipeline schedules that split the backward pass: ZB-H1, ZB-V, DualPipeV, V-Min and V-Half, as lists of actions.

A linear's backward has two products: the gradient of its input, which the previous stage waits for, and the gradient
of its weight, which nobody waits for.  These schedules run the second ("W") later, where the rank would idle.
All but ZB-H1 also lay the stages as a V: two chunks a rank, chunk 1 of rank r is stage 2p − 1 − r, so that
rank 0 has both ends of the model.  Their timelines need ``v_shaped=True``.
``activations.weight_gradient_rows`` says what "W" needs of what a layer keeps.
Sources: 2401.10241 for ZB-H1 (section 3.1) and ZB-V (section 6); DeepSeek's DualPipe, 2412.19437 section 3.2.1;
2405.15362 sections 3 and 4 for V-Min's and V-Half's microbatch and peak: their times are our own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from actmem.config import ConfigError, ModelShape, Parallel
from actmem.formulas.activations import layer_rows
from actmem.formulas.schedule import (
    Action,
    Schedule,
    check_schedule_length,
    interleaved,
    one_forward_one_backward,
)
from actmem.rows import Row


def zero_bubble_h1(
    pipeline_parallel_size: int,
    num_microbatches: int,
    num_model_chunks: int = 1,
    microbatches_per_round: int | None = None,
) -> Schedule:
    """ZB-H1: 1F1B's forwards and backwards, each "W" delayed by r backwards on rank r.

    Rank r has p − r microbatches between forward and backward, and r more that wait for their "W": p on every rank,
    what 1F1B holds on rank 0.  Idle time (p − 1)(F + B − W) in place of (p − 1)(F + B + W).  num_model_chunks: more
    than one delays the interleaved order's with the short warm-up in the same way, as torch's ScheduleInterleavedZeroBubble
    does.
    """
    p, m, n = pipeline_parallel_size, num_model_chunks, num_microbatches
    if m == 1:
        ranks = one_forward_one_backward(p, n)
    else:
        ranks = interleaved(p, m, n, microbatches_per_round, short_warmup=True)
    return [_delay_weights(actions, delay=rank) for rank, actions in enumerate(ranks)]


def _delay_weights(actions: list[Action], delay: int) -> list[Action]:
    """After every backward the "W" of the backward ``delay`` before it, and at the end the rest."""
    weights = [Action("W", a.rank, a.chunk, a.microbatch) for a in actions if a.kind == "B"]
    done, found = 0, []
    for action in actions:
        found.append(action)
        if action.kind == "B":
            done += 1
            found += weights[done - 1 - delay : done - delay] if done > delay else []
    return found + weights[max(0, done - delay) :]


def zero_bubble_v(pipeline_parallel_size: int, num_microbatches: int) -> Schedule:
    """ZB-V: two chunks a rank laid as a V, no idle time between a rank's first and last action if F = B = W.

    That needs n ≥ 2p − 1 microbatches; with fewer, the order is that of 2p − 1 without the others.  Every rank holds up
    to 2p chunk-microbatches: as many bytes as 1F1B's rank 0.
    """
    p, n = pipeline_parallel_size, num_microbatches
    check_schedule_length(2 * p * n)
    full = max(n, 2 * p - 1)
    ranks = []
    for r in range(p):
        script = "F0 " * (2 * (p - r) - 1) + "F1 F0 " * r + "F1 I1 W1 " * (p - r)
        both = full - (2 * p - r - 1)  # forwards of chunk 0 that are left
        script += "F0 I0 W0 F1 I1 W1 " * both + "I0 W0 F1 I1 W1 " * (full - p - both)
        script += "I0 I1 " * r + "I0 W0 " * (p - r) + "W1 " * r + "W0 " * r
        ranks.append([action for action in _acted(r, script) if action.microbatch < n])
    return ranks


def dual_pipe_v(pipeline_parallel_size: int, num_microbatches: int) -> Schedule:
    """DualPipeV: on a V, a forward of one chunk beside a whole backward of the other; "W" only at both ends.

    A forward and the backward after it may run at once, to hide their communication; here they run in turn.  Holds up to
    2p + 1 chunk-microbatches.  Raises ConfigError unless n ≥ 2p, as torch does.
    """
    p, n = pipeline_parallel_size, num_microbatches
    check_schedule_length(2 * p * n)
    if n < 2 * p:
        raise ConfigError("num_microbatches", f"DualPipeV needs at least one a stage, 2p = {2 * p}, got {n}")
    ranks = []
    for r in range(p):
        after = p - r - 1  # ranks below in the V
        script = "F0 " * (2 * after) + "F0 F1 " * (r + 1) + "I1 W F1 " * after
        script += "F0 B1 F1 B0 " * (n - 2 * p + r + 1) + "B1 F1 B0 " * after
        # Of the next 2(r + 1) backwards, by turns of chunk 1 and 0, the first half is whole.
        script += " ".join("BI"[turn > r] + "10"[turn % 2] for turn in range(2 * (r + 1))) + " "
        script += "W I0 " * after + "W " * (r + 1)
        ranks.append(_acted(r, script))
    return ranks


def _acted(rank: int, script: str) -> list[Action]:
    """The actions of a script, microbatches counted up.

    "F1": a forward of chunk 1.  "B1": a whole backward, "I1": one without its "W".  "W1": the longest waiting "W" of
    chunk 1, "W": of any chunk.
    """
    count: Counter[str] = Counter()
    waiting: list[Action] = []
    actions = []
    for word in script.split():
        letter, digit = word[0], word[1:]
        if letter == "W":
            weight = next(one for one in waiting if digit in ("", str(one.chunk)))
            waiting.remove(weight)
            actions.append(weight)
            continue
        kind = "F" if letter == "F" else "B"
        microbatch = count[kind + digit]
        count[kind + digit] += 1
        actions.append(Action(kind, rank, int(digit), microbatch))
        if letter == "I":
            waiting.append(Action("W", rank, int(digit), microbatch))
    return actions


# V-Min and V-Half hold about a third and a half of 1F1B's rank 0 on every rank.  A building block is the six actions of one
# microbatch on one rank (F, B and W of two chunks), at fixed times in units of one action.  Repeated every six units, it
# fills the rank without gaps, if no two of its times are equal modulo 6.  What a rank holds is how long a block's chunks
# live, over 6.  On a V, the rank that keeps chunk 0 longest keeps chunk 1 shortest, so the sum can be the same on all.
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


def weight_gradient_rows(shape: ModelShape, parallel: Parallel = Parallel(), element_size: int = 2) -> list[Row]:
    """What one layer must keep from its "B" to its "W": 32sbh bytes in 16 bits, 32sbh/t with sequence parallelism.

    A pipeline schedule with a split backward needs the inputs of the four linears, 7esbh, and
    the gradients of their outputs, 9esbh.  With sequence parallelism the gradients of the row-parallel outputs are shards,
    gathered again as the inputs of the other two are; without it, they are whole on every rank.  Layer norms and biases
    need nothing: their gradients are ready with "B".  Source: 2401.10241 table 1 (M_W), for t = 1.
    """
    _, b, h, s = shape.letters()
    e, t = element_size, parallel.tensor_parallel_size
    linears = ("QKV projection input", "attention projection input", "h→4h input", "4h→h input")
    inputs = [row for row in layer_rows(shape, parallel, "none", e) if row.term in linears]
    whole = parallel.sequence_parts
    return inputs + [
        Row("gradient of Q, K and V", 3 * e * s * b * h // t, t, "2401.10241 table 1"),
        Row("gradient of the attention projection's output", e * s * b * h // whole, whole, "2401.10241 table 1"),
        Row("gradient of the GeLU input", 4 * e * s * b * h // t, t, "2401.10241 table 1"),
        Row("gradient of the 4h→h output", e * s * b * h // whole, whole, "2401.10241 table 1"),
    ]
