"""Lab 3's upkeep of replicas: partial gradients, and which dropouts must agree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actmem.measure.comms import Collective
from actmem_course.judge.compare import close, describe, grad_of, summed
from actmem_course.judge.lab_checks.lab3_layer import PARTIAL
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench
from actmem_course.pieces import LayerWeights, random_weights


def check_sum_partial_gradients(b: Bench) -> None:
    t, heads = b.size, 2 * b.size
    h = 3 * heads
    dense = [random_weights(h, heads, seed=40 + rank, device=b.device).part(rank, t) for rank in range(t)]
    own = dense[b.rank].map(lambda name, tensor: tensor.clone().requires_grad_())
    for tensor in own.named().values():
        tensor.grad = tensor.detach() * 3  # any numbers; each rank has others
    before = {name: tensor.detach().clone() for name, tensor in own.named().items()}
    with b.watching() as seen:
        b["sum_partial_gradients"](own, b.group)
    changed = [name for name, tensor in own.named().items() if not torch.equal(tensor.detach(), before[name])]
    if changed:
        raise Wrong(f"the parameters themselves are changed ({', '.join(changed)}); only their .grad may be")
    everyone = [{name: tensor * 3 for name, tensor in weights.named().items()} for weights in dense]
    _check_sums(b, own, everyone)
    if t > 1:
        _check_traffic(t, seen.collectives, sum(everyone[0][name].numel() * 8 for name in PARTIAL))


def _check_traffic(t: int, collectives: Sequence[Collective], partial_bytes: int) -> None:
    """Raise Wrong if more bytes are exchanged than it takes to gather every rank's partial gradients.

    On the wire: a ring sends (t − 1)/t of a tensor, for an all-reduce twice.  To gather all parts
    and add them up is as cheap with two ranks and dearer with more, but a right way to the numbers.
    """
    sent = sum(c.payload_bytes * (2 if c.kind == "all-reduce" else 1) for c in collectives)
    if sent > max(2, t) * partial_bytes:
        sent, enough = ((t - 1) * size // t for size in (sent, 2 * partial_bytes))
        raise Wrong(
            f"the numbers are right, but each rank sends {sent:,} B where {enough:,} B are enough: all-reduce the partial gradients only"
        )


def _check_sums(b: Bench, own: LayerWeights, everyone: list[dict[str, Tensor]]) -> None:
    t = b.size
    left: list[str] = []
    too_many: list[str] = []
    averaged: list[str] = []
    for name, tensor in own.named().items():
        if tensor.grad is None:
            raise Wrong(f"{name}.grad is None afterwards")
    _check_one_way(b, own, everyone)
    for name, tensor in own.named().items():
        gradient, mine = grad_of(tensor), everyone[b.rank][name]
        total = summed(of_rank[name] for of_rank in everyone)
        right = total if name in PARTIAL else mine
        if close(gradient, right):
            continue
        if name in PARTIAL and close(gradient, mine):
            left.append(name)
        elif name in PARTIAL and close(gradient, total / t):
            averaged.append(name)
        elif name not in PARTIAL and not close(gradient, mine):
            too_many.append(name)
        else:
            raise Wrong(describe(f"{name}.grad", gradient, right, t))
    if averaged:
        raise Wrong(
            f"averaged over the ranks: {', '.join(averaged)}. Each rank holds a part of the gradient, so the parts must be summed"
        )
    if too_many:
        raise Wrong(
            f"summed, but must not be: {', '.join(too_many)}. They are cut among the ranks and saw all tokens, so each rank's gradient is complete"
        )
    if set(left) == set(PARTIAL):
        raise Wrong(
            "no .grad has changed: an all-reduce works in place, so give it the .grad itself, or copy the result back"
        )
    if left:
        raise Wrong(
            f"still this rank's part only: {', '.join(left)}. They are replicated, and each rank's saw s/t tokens"
        )


def _check_one_way(b: Bench, own: LayerWeights, everyone: list[dict[str, Tensor]]) -> None:
    """Raise Wrong, on all ranks alike, if partial gradients went to one rank only, or from one rank only."""
    found = [getattr(own, name).grad for name in PARTIAL]
    parts = [[of_rank[name] for name in PARTIAL] for of_rank in everyone]
    sums = [summed(of_name) for of_name in zip(*parts)]

    def same(expected: list[Tensor]) -> bool:
        return all(close(gradient, value) for gradient, value in zip(found, expected))

    seen = b.gather((same(sums), [same(part) for part in parts]))
    if b.size == 1 or all(all_summed for all_summed, _ in seen):
        return
    for rank in range(b.size):
        if all(has[rank] for _, has in seen):
            raise Wrong(
                f"every rank has rank {rank}'s part: each saw different tokens, so the parts must be summed (all-reduce), not copied"
            )
        if [all_summed for all_summed, _ in seen] == [other == rank for other in range(b.size)]:
            raise Wrong(
                f"only rank {rank} has the sum; the others update the same parameters and need it too: all-reduce, not reduce"
            )


def check_dropout_generators(b: Bench) -> None:
    for sequence_parallel in (False, True):
        core, block = _draws(b, 1234, sequence_parallel)
        again = _draws(b, 1234, sequence_parallel)
        other = _draws(b, 4321, sequence_parallel)
        when = "with sequence_parallel" if sequence_parallel else "without sequence_parallel"
        if not (torch.equal(core, again[0]) and torch.equal(block, again[1])):
            raise Wrong(
                "the same seed gives other numbers the second time: seed each generator with manual_seed, from seed alone"
            )
        if torch.equal(core, other[0]) or torch.equal(block, other[1]):
            raise Wrong("another seed gives the same numbers: derive each generator's seed from the argument seed")
        _check_streams(b, core, block, when, sequence_parallel)


def _draws(b: Bench, seed: int, sequence_parallel: bool) -> tuple[Tensor, Tensor]:
    """What the two generators draw."""
    torch.manual_seed(99)
    before = torch.get_rng_state()
    with b.watching():
        result = b["dropout_generators"](seed, sequence_parallel, b.device, b.group)
    if not torch.equal(before, torch.get_rng_state()):
        raise Wrong(
            "torch's default generator is changed (torch.manual_seed, or a draw without generator=): create two generators"
        )
    if (
        not isinstance(result, (tuple, list))
        or len(result) != 2
        or not all(isinstance(g, torch.Generator) for g in result)
    ):
        raise Wrong("expected two torch.Generators: for Dropouts.core and for Dropouts.block")
    core, block = result
    first = torch.rand(64, generator=core, device=b.device)
    # One generator for both is fine where both are this rank's own: the draws then follow each other.
    return first.cpu(), torch.rand(64, generator=block, device=b.device).cpu()


def _check_streams(b: Bench, core: Tensor, block: Tensor, when: str, sequence_parallel: bool) -> None:
    cores, blocks = zip(*b.gather((core, block)))

    def alike(draws: tuple[Tensor, ...]) -> bool:
        return any(torch.equal(draws[i], draws[j]) for i in range(len(draws)) for j in range(i))

    if alike(cores):
        raise Wrong(
            f"{when}, ranks draw the same for core: each holds different heads, so every rank must drop differently there"
        )
    if sequence_parallel and alike(blocks):
        raise Wrong(
            f"{when}, ranks draw the same for block: each holds different tokens, and would repeat one pattern of drops"
        )
    if not sequence_parallel and b.size > 1 and not all(torch.equal(blocks[0], draw) for draw in blocks):
        raise Wrong(
            f"{when}, ranks draw different numbers for block: each holds the whole [s, b, h], and the replicas would drift apart"
        )
    if any(torch.equal(c, d) for c in cores for d in blocks):
        raise Wrong(
            f"{when}, core and block draw the same numbers on some ranks: give the two generators seeds that are never equal"
        )
