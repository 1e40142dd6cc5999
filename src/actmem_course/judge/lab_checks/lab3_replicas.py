"""Lab 3's upkeep of replicas: partial gradients, and which dropouts must agree."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from actmem_course.judge.compare import close, describe, grad_of
from actmem_course.judge.lab_checks.exchanged import OWN_PART, SUM, made_of
from actmem_course.judge.lab_checks.lab3_sequence_parallel import PARTIAL
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench
from actmem_course.pieces import random_weights

_CUT = "They are cut among the ranks and saw all tokens, so each rank's gradient is complete: leave it as it is"
_REPLICATED = "They are replicated, and each rank's saw s/t tokens, so the gradient is the sum of the ranks' parts"


def check_sum_partial_gradients(b: Bench) -> None:
    t, heads = b.size, 2 * b.size
    ranks = [random_weights(3 * heads, heads, seed=40 + rank, device=b.device).part(rank, t) for rank in range(t)]
    own = ranks[b.rank].map(lambda name, tensor: tensor.clone().requires_grad_())
    everyone = [{name: tensor * 3 for name, tensor in weights.named().items()} for weights in ranks]  # any numbers
    for name, tensor in own.named().items():
        tensor.grad = everyone[b.rank][name].clone()
    with b.watching() as seen:
        b["sum_partial_gradients"](own, b.group)
    before = ranks[b.rank].named()
    changed = [name for name, tensor in own.named().items() if not torch.equal(tensor.detach(), before[name])]
    if changed:
        raise Wrong(f"the parameters themselves are changed ({', '.join(changed)}); only their .grad may be")
    for name, tensor in own.named().items():
        if tensor.grad is None:
            raise Wrong(f"{name}.grad is None afterwards")
    _check_sums(b, {name: grad_of(tensor) for name, tensor in own.named().items()}, everyone)
    # On the wire a ring sends (t − 1)/t of a tensor, for an all-reduce twice.  To gather all parts and add them up is as
    # cheap with two ranks and dearer with more, but a right way to the numbers.
    sent = sum(c.payload_bytes * (2 if c.kind == "all-reduce" else 1) for c in seen.collectives)
    enough = 2 * sum(everyone[0][name].numel() * 8 for name in PARTIAL)
    if t > 1 and sent > max(2, t) * enough // 2:
        raise Wrong(
            f"the numbers are right, but each rank sends {(t - 1) * sent // t:,} B where {(t - 1) * enough // t:,} B are enough: "
            "all-reduce the partial gradients only"
        )


def _check_sums(b: Bench, found: dict[str, Tensor], everyone: list[dict[str, Tensor]]) -> None:
    """Raise Wrong unless each gradient is the sum of the ranks', or this rank's own; say of each which it is."""
    wrong: dict[tuple[str, str], list[str]] = {}  # what it is and should be -> whose gradient
    fits: dict[str, list[str]] = {}
    for name, gradient in found.items():
        parts, partial = [of_rank[name] for of_rank in everyone], name in PARTIAL
        right = (SUM if partial else OWN_PART).make(parts, b.rank)
        fits[name] = ["right"] if close(gradient, right) else [words for words, _ in made_of(gradient, parts, b.rank)]
        if fits[name] != ["right"]:
            is_ = f".grad is {fits[name][0]}" if fits[name] else describe(".grad", gradient, right, b.size)
            wrong.setdefault((is_, _REPLICATED if partial else _CUT), []).append(name)
    of_ranks = b.gather([fits[name] for name in PARTIAL])
    for rank in range(b.size):
        copied = [all(f"rank {rank}'s part" in words for words in of) for of in of_ranks]
        if wrong and all(has or other == rank for other, has in enumerate(copied)):
            raise Wrong(
                f"every rank has rank {rank}'s part: each saw different tokens, so the parts must be summed (all-reduce), not copied"
            )
        if b.size > 1 and [of == [["right"]] * len(PARTIAL) for of in of_ranks] == [k == rank for k in range(b.size)]:
            raise Wrong(
                f"only rank {rank} has the sum; the others update the same parameters and need it too: all-reduce, not reduce"
            )
    if wrong == {(f".grad is {OWN_PART.words}", _REPLICATED): list(PARTIAL)}:
        raise Wrong(
            "no .grad has changed: an all-reduce works in place, so give it the .grad itself, or copy the result back"
        )
    if wrong:
        raise Wrong("; ".join(f"{is_}: {', '.join(names)}. {why}" for (is_, why), names in wrong.items()))


def check_dropout_generators(b: Bench) -> None:
    for parallel in (False, True):
        when = "with sequence_parallel" if parallel else "without sequence_parallel"
        draws, again, other = (_draws(b, seed, parallel) for seed in (1234, 1234, 4321))
        if not all(map(torch.equal, draws, again)):
            raise Wrong(
                "the same seed gives other numbers the second time: seed each generator with manual_seed, from seed alone"
            )
        if any(map(torch.equal, draws, other)):
            raise Wrong("another seed gives the same numbers: derive each generator's seed from the argument seed")
        _check_streams(b, draws, parallel, when)
        # A seed that is multiplied makes the same of 0 everywhere.
        _check_streams(b, _draws(b, 0, parallel), parallel, f"{when} and with seed 0")


def _check_streams(b: Bench, draws: tuple[Tensor, Tensor], parallel: bool, when: str) -> None:
    cores, blocks = zip(*b.gather(draws))
    faults = {
        "the first generator draws what the second should, and the other way round: core comes first, then block":
            not parallel and b.size > 1 and not _alike(blocks) and all(torch.equal(cores[0], draw) for draw in cores),
        "ranks draw the same for core: each holds different heads, so every rank must drop differently there": _alike(cores),
        "ranks draw the same for block: each holds different tokens, and would repeat one pattern of drops":
            parallel and _alike(blocks),
        "ranks draw different numbers for block: each holds the whole [s, b, h], and the replicas would drift apart":
            not parallel and not all(torch.equal(blocks[0], draw) for draw in blocks),
        "core and block draw the same numbers on some ranks: give the two generators seeds that are never equal":
            any(torch.equal(core, block) for core in cores for block in blocks),
    }  # fmt: skip
    for diagnosis, found in faults.items():
        if found:
            raise Wrong(f"{when}, {diagnosis}")


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
    if not isinstance(result, (tuple, list)) or [isinstance(g, torch.Generator) for g in result] != [True, True]:
        raise Wrong("expected two torch.Generators: for Dropouts.core and for Dropouts.block")
    # One generator for both is fine where both are this rank's own: the draws then follow each other.
    core, block = (torch.rand(64, generator=generator, device=b.device).cpu() for generator in result)
    return core, block


def _alike(draws: tuple[Tensor, ...]) -> bool:
    return any(torch.equal(a, b) for a, b in combinations(draws, 2))
