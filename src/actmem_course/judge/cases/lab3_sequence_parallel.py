"""Lab 3: its cases, the functions that test a learner's answers."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from actmem.ledger.comms import Collective
from actmem_course.judge.case import Advice, CaseRun
from actmem_course.judge.solutions.lab3_sequence_parallel import gathering_linear as our_linear
from actmem_course.judge.verdict import Wrong, mend, refuse
from actmem_course.reference_layer import LayerWeights, random_weights

#: Parameters that each rank uses for its s/t tokens only, so that it computes a part of their gradient.
PARTIAL = ("norm1_weight", "norm1_bias", "projection_bias", "norm2_weight", "norm2_bias", "down_bias")


_G: Advice = {
    "": "g's forward gathers the tokens of all ranks along dimension 0, rank 0's first",
    "x": mend(
        "g's backward must reduce-scatter once, with SUM",
        "Every rank used all tokens, so their gradients add up, and each rank needs those of its own tokens",
    ),
}
_G_BAR = {
    "": mend(
        "g_bar's forward must reduce-scatter once, with SUM",
        "Each rank's x is one term of a sum over all ranks, and r·s/t to (r + 1)·s/t − 1 are rank r's tokens",
    ),
    "x": mend(
        "g_bar's backward must all-gather", "This rank's x went into all tokens, so it needs the gradients of all ranks"
    ),
}


def g(r: CaseRun) -> None:
    r.operator("g", r.each(r.t, r.t, 5), _G)  # t divides both, so that whoever shards by mistake can


def g_bar(r: CaseRun) -> None:
    r.operator("g_bar", r.each(2 * r.t, r.t, 2 * r.t), _G_BAR)  # t divides all, so that whoever shards by mistake can


def gathering_linear(r: CaseRun) -> None:
    # Backward may gather again already here, which only 3.5 asks for.
    _linear(r, r["gathering_linear"], r.t, gathers_again=True)


def shard_keeping_linear(r: CaseRun) -> None:
    def own(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return r["shard_keeping_linear"](x, weight, bias, r.group)

    given, repair = _linear(r, r["shard_keeping_linear"]), "save the shard, and gather it again in backward"
    r.saves(own, *given, what="x, this rank's tokens", repair=repair, itself=True)


def _linear(r: CaseRun, function, tokens: int = 2, gathers_again: bool = False) -> list[Tensor]:
    given = {"x": r.each(tokens, 3, 6), "weight": r.each(5, 6), "bias": r.each(5)}
    again = [Collective("all-gather", r.t * given["x"].nbytes)] if gathers_again else []
    r.observe(function, given, r.group, allowed_extra=again)
    return list(given.values())


class Scaling:
    """Replaces a layer's ``Dropouts`` in a test: each method multiplies its input by a fixed factor.

    The factor of ``core`` is 0.6; ``block`` takes 0.7 and 0.3 in turns, so that its two calls in a layer can be told
    apart.  None of these is 1/t for any number t of ranks: if an answer sums a tensor over the ranks where it
    shouldn't, a factor of 1/t would make that tensor right again, and the test would not see the mistake.
    """

    def __init__(self) -> None:
        #: How often block was called, and the tokens that it was given last.
        self.blocks, self.tokens = 0, 0

    def core(self, weights: Tensor) -> Tensor:
        return weights * 0.6

    def block(self, x: Tensor) -> Tensor:
        self.blocks, self.tokens = self.blocks + 1, x.shape[0]
        return x * (0.7, 0.3)[(self.blocks - 1) % 2]


def layer(r: CaseRun) -> None:
    heads, s, calls = 3 * r.t, 3 * r.t, []  # a/2 isn't t

    def linear(x, weight, bias, group):  # gathering_linear's own names: a learner may call it with keywords
        if 1 < r.t and x.shape[0] == s:
            raise Wrong("linear is given all tokens", "give it this rank's, without g", "linear gathers them itself")
        calls.append(weight)
        return our_linear(x, weight, bias, group)

    linear.__qualname__ = "linear"  # what Python says of wrong arguments begins with it

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        scaling = Scaling()
        try:
            return r["layer"](x, LayerWeights(heads, *parameters), scaling, linear, r.group)
        except RuntimeError:
            if r.t > 1 and scaling.tokens == s:  # too many for the addition, of which torch tells the sizes only
                what = "attention" if scaling.blocks == 1 else "the MLP"
                raise Wrong(
                    f"the result of {what} has all tokens, but x has this rank's",
                    "end each block with g_bar, which sums over the ranks and keeps this rank's tokens",
                ) from None
            raise

    weights = _drawn(4 * heads, heads, 30, r.device).part(r.rank, r.t).named()
    advice = {"": "end each block with g_bar, which keeps this rank's tokens"}
    r.observe(function, {"x": r.shard(s, 2, 4 * heads), **weights}, summed=PARTIAL, advice=advice)
    often = ("never called", "called once")[len(calls)] if len(calls) < 2 else f"called {len(calls)} times"
    use = "use it for QKV and for h → 4h, so that the lab can replace it"
    r.see_cost(f"linear is {often}", abs(len(calls) - 2), use, name="calls of linear")


@cache
def _drawn(hidden_size: int, heads: int, seed: int, device: str) -> LayerWeights:
    """Draw weights, once: hundreds of edits run on copies of them, and drawing takes a quarter of such a run."""
    return random_weights(hidden_size, heads, seed=seed, device=device)


def sum_partial_gradients(r: CaseRun) -> None:
    w = _drawn(6 * r.t, 2 * r.t, 40 + r.rank, r.device).part(r.rank, r.t)
    w = w.map(lambda name, x: x.clone().requires_grad_())
    for x in w.named().values():
        x.grad = 3 * x.detach()  # any numbers
    before, given = w.map(lambda name, x: x.detach().clone()).named(), replace(w)
    with r.watching() as seen:
        r["sum_partial_gradients"](given, r.group)
    changed = [name for name, x in w.named().items() if not torch.equal(x.detach(), before[name])]
    if changed:
        raise Wrong(f"the parameters themselves are changed ({', '.join(changed)})", "change only their .grad")
    for name, x in w.named().items():
        r.see_tensor(f"{name}.grad", x.grad, _REPLICATED if name in PARTIAL else _SHARDED, parts=3 * before[name])
    # A ring sends (t − 1)/t of a tensor, for an all-reduce twice.  To gather all parts and add them up is right too: it
    # sends as much with two ranks, and more with more.
    sent = sum(c.payload_bytes * (2 if c.kind == "all-reduce" else 1) for c in seen.collectives)
    enough = 2 * sum(before[name].nbytes for name in PARTIAL)
    words = "each rank sends {found:,} B where {enough:,} B are enough"
    count = (r.t - 1) * (enough if sent <= max(2, r.t) * enough // 2 else sent) // r.t
    r.see_cost(words, count, "all-reduce the partial gradients only")


_SHARDED = mend("leave its gradient as it is", "this parameter is sharded among the ranks and saw all tokens")
_REPLICATED = mend(
    "sum it over the ranks once, and divide by nothing",
    "This parameter is replicated, and each rank's copy saw only s/t tokens",
)


def dropout_generators(r: CaseRun) -> None:
    try:
        r["dropout_generators"](0, False, "xpu", r.group)
    except RuntimeError:  # as it should: this machine has none
        pass
    else:
        raise Wrong("device is not used", "create the generators with torch.Generator(device)")
    for parallel in (False, True):
        draws: dict[str, list[float]] = {}
        # A seed that is multiplied makes the same of 0 everywhere.
        for words, seed in (("", 1234), (" the second time", 1234), (" with another seed", 4321), (" with seed 0", 0)):
            torch.manual_seed(99)
            before = torch.get_rng_state()
            with r.watching():
                pair = r["dropout_generators"](seed, parallel, r.device, r.group)
            if not torch.equal(before, torch.get_rng_state()):
                how = "torch.manual_seed changes it, and so does a draw without generator="
                raise Wrong("torch's default generator is changed", "create two generators", how)
            if not isinstance(pair, (tuple, list)) or [isinstance(x, torch.Generator) for x in pair] != [True, True]:
                raise Wrong("expected two torch.Generators: for Dropouts.core and for Dropouts.block")
            # One generator for both is fine where both are this rank's own: the draws then follow each other.
            if pair[0] is pair[1] and not parallel and r.t > 1:
                raise Wrong(
                    "without sequence_parallel, one generator serves core and block",
                    "create two",
                    "core's draws differ by rank, block's must not",
                )
            for name, generator in zip(("core", "block"), pair):
                draws[f"{name}{words}"] = torch.rand(64, generator=generator, device=r.device).tolist()
        refuse(_faults_of_draws(f"with{'' if parallel else 'out'} sequence_parallel", r.gather(draws), parallel))
        first: dict[int, dict] = {}  # by the number in the group
        if any(first.setdefault(number, drawn) != drawn for number, drawn in r.side.gather((r.rank, draws))):
            raise Wrong("ranks that have the same number in two groups draw different numbers")


def _faults_of_draws(when: str, everyone: list[dict[str, list[float]]], parallel: bool) -> Iterator[tuple]:
    """Yield what can be wrong with the ranks' draws, the gravest first, as ``refuse`` takes it.

    Args:
        when: words that say with which arguments it was.
        everyone: for each rank of the group, its draws by generator and seed.
        parallel: whether it was with sequence parallelism.
    """
    of_seed = "make each generator's seed from seed, on rank 0 too, where a product with the rank is 0"
    for name in ("core", "block"):
        again = any(draws[name] != draws[f"{name} the second time"] for draws in everyone)
        seeded = "seed each with manual_seed, from seed and the rank"
        yield again, "the same seed gives other numbers the second time", seeded
        same = any(draws[name] == draws[f"{name} with another seed"] for draws in everyone)
        yield same, "another seed gives the same numbers", of_seed
    for seed in ("", " with seed 0"):
        here = f"{when}{' and' if seed else ''}{seed}"
        core, block = ([draws[f"{name}{seed}"] for draws in everyone] for name in ("core", "block"))
        swapped = not parallel and len(core) > 1 and core.count(core[0]) == len(core) and not _repeats(block)
        yield swapped, f"{here}, core draws as block should, and block as core", "return core first, then block"
        heads = "each holds different heads, so every rank must drop differently there"
        yield _repeats(core), f"{here}, ranks draw the same for core", "", heads
        tokens = "each holds different tokens, and would repeat one pattern of drops"
        yield parallel and _repeats(block), f"{here}, ranks draw the same for block", "", tokens
        replicas = "each holds the whole [s, b, h], and the replicas would drift apart"
        apart = not parallel and any(draws != block[0] for draws in block)
        yield apart, f"{here}, ranks draw different numbers for block", "", replicas
        both = f"{here}, core and block draw the same numbers on some ranks"
        shared = any(draws in block for draws in core)
        yield shared, both, "give them seeds that are never equal", "they would drop in the same pattern"


def _repeats(draws: list) -> bool:
    return any(draw in draws[:k] for k, draw in enumerate(draws))
