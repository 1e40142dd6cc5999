"""Lab 1: predictions, judged by what real layers keep.

No cases: a wrong number is explained by its ratio to the measured one, however the formula is written.
"""

from __future__ import annotations

import torch

from actmem.config import ModelShape
from actmem.formulas.activations import CORE_ATTENTION_TERMS
from actmem.measure.emulate import emulated_rank
from actmem.measure.parts import measure_layer
from actmem.models import PAPER_MODELS
from actmem.parallel.groups import tensor_parallel
from actmem.rows import LAYER_TERMS, by_term
from actmem_course.judge.compare import named_value
from actmem_course.judge.kept import kept
from actmem_course.judge.lab_checks.ratios import check_whole_number, explain_difference, explain_ratio
from actmem_course.judge.reward import BarsReward, Measure, Reward
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench

#: s, b, h, a that share no factor, so that every wrong power of one of them shows.
_SHAPES = (ModelShape(11, 3, 35, 5), ModelShape(7, 2, 39, 13), ModelShape(17, 5, 22, 2))


def measured(
    shape: ModelShape, tensor_parallel_size: int = 1, sequence_parallel: bool = False, recompute: str = "none"
) -> dict[str, int]:
    """Bytes of the paper's terms that our layer keeps on one rank, counted in an emulated run."""
    with emulated_rank(tensor_parallel_size):
        tp = tensor_parallel(sequence_parallel=sequence_parallel)
        rows = by_term(measure_layer(shape, tp, recompute))
    return {term: size for term, size in rows.items() if term in LAYER_TERMS}


def check_layer_bytes(b: Bench) -> None:
    found, true = [], []
    for shape in _SHAPES:
        heads, micro_batch, h, s = shape.letters()
        answer = b["layer_bytes"](s, micro_batch, h, heads)
        if not isinstance(answer, dict):
            raise Wrong(
                f"expected a dict of bytes by name, got {type(answer).__name__}"
                + (": is a return missing?" if answer is None else "")
            )
        missing = [term for term in LAYER_TERMS if term not in answer]
        unknown = [term for term in answer if term not in LAYER_TERMS]
        if missing or unknown:
            parts = [f"missing {', '.join(missing)}"] * bool(missing)
            parts += [f"not among them {', '.join(map(str, unknown))}"] * bool(unknown)
            raise Wrong("expected exactly the 15 names: " + "; ".join(parts))
        found.append({term: check_whole_number(term, value) for term, value in answer.items()})
        true.append(measured(shape))
    sizes = [dict(zip("abhs", shape.letters())) for shape in _SHAPES]
    faults = [
        f"{term} {explain_ratio([(f[term], t[term]) for f, t in zip(found, true)], sizes, _letters(term))}"
        + _reason(term, found[0][term], true[0][term])
        for term in LAYER_TERMS
        if any(f[term] != t[term] for f, t in zip(found, true))
    ]
    if faults:
        others = len(faults) - 2
        more = f"; {others} more {'terms are' if others > 1 else 'term is'} wrong" if others > 0 else ""
        raise Wrong("; ".join(faults[:2]) + more)


def _letters(term: str) -> str:
    """The letters in a term's size."""
    return "abs" if "softmax" in term else "bhs"


def _reason(term: str, found: int, true: int) -> str:
    if "mask" in term and found == 2 * true:
        return " (a mask takes 1 byte an element, not 2)"
    if "mask" not in term and found * 2 == true:
        return " (2 bytes an element)"
    if term in ("GeLU input", "4h→h input") and found * 4 == true:
        return " (it is 4h wide)"
    return ""


def check_rank_bytes(b: Bench) -> None:
    shape = ModelShape(12, 3, 40, 8)
    heads, micro_batch, h, s = shape.letters()
    for t, sequence_parallel, recompute in (
        (1, False, "none"), (4, False, "none"), (4, True, "none"), (2, False, "selective"), (4, True, "selective"), (4, False, "full"), (4, True, "full"),
    ):  # fmt: skip
        found = check_whole_number(
            "the result", b["rank_bytes"](s, micro_batch, h, heads, t, sequence_parallel, recompute)
        )
        true = sum(measured(shape, t, sequence_parallel, recompute).values())
        if found == true:
            continue
        case = f"t={t}, {'with' if sequence_parallel else 'without'} sequence parallelism, recompute={recompute!r}"
        if mistake := named_value(found, _rank_mistakes(shape, t, sequence_parallel, recompute)):
            raise Wrong(f"{case}: {mistake}")
        why = explain_difference(
            found - true,
            measured(shape, t, sequence_parallel, recompute),
            measured(shape, t, sequence_parallel, "none"),
            measured(shape) if t > 1 else {},
            recompute,
        )
        raise Wrong(
            f"{case}: predicted {found:,} B, measured {true:,} B for s={s} b={micro_batch} h={h} a={heads}{why and ': ' + why}"
        )


def _rank_mistakes(shape: ModelShape, t: int, sequence_parallel: bool, recompute: str) -> dict[str, int]:
    """What comes of taking one argument for another, and of a few other mistakes."""
    heads, micro_batch, h, s = shape.letters()
    sbh, core = s * micro_batch * h, 5 * heads * s * s * micro_batch

    def keeps(t: int = t, sequence_parallel: bool = sequence_parallel, recompute: str = recompute) -> int:
        cut = t if sequence_parallel else 1
        return (
            2 * sbh // cut
            if recompute == "full"
            else 10 * sbh // cut + 24 * sbh // t + core // t * (recompute == "none")
        )

    right, other_cut = keeps(), keeps(sequence_parallel=not sequence_parallel)
    twice = {
        "the coefficients are bytes already, but they are multiplied by 2 again": 2 * right,
        "elements are counted, not bytes": right // 2,
    }
    if recompute == "full":
        return {
            "this is what selective recomputation keeps; full recomputation keeps only the layer's input": keeps(
                recompute="selective"
            ),
            "the layer's input is cut by sequence parallelism, so it is 2sbh/t"
            if sequence_parallel
            else "the layer's input is 2sbh on every rank without sequence parallelism": other_cut,
        } | twice
    return {
        "5as²b is not divided by t, although the heads are shared among the ranks": right + core - (core // t if recompute == "none" else 0),
        "10sbh is not divided by t: sequence parallelism shares layer norms and dropouts too" if sequence_parallel else
        "the two layer-norm inputs, two block inputs and two masks (10sbh) are divided by t; without sequence parallelism every rank keeps them whole": other_cut,
        "nothing is divided by t": keeps(t=1),
    } | twice | ({
        "sequence parallelism divides more than one input (2sbh): two layer-norm inputs, two block inputs, two masks, 10sbh in all":
            right + 8 * sbh - 8 * sbh // t,
    } if sequence_parallel else {}) | ({
        "this is what is kept without recomputation: selective drops the three tensors of the core attention, 5as²b/t": keeps(recompute="none"),
        "Q, K and V are dropped as well: the second run starts from them, so they stay": right - 6 * sbh // t,
    } if recompute == "selective" else {})  # fmt: skip


def check_gated_mlp_bytes(b: Bench) -> None:
    for s, micro_batch, h, f in ((5, 3, 8, 14), (7, 2, 10, 22)):
        found = check_whole_number("the result", b["gated_mlp_bytes"](s, micro_batch, h, f))
        true = _keeps(b, s, micro_batch, h, f)
        x, wide = 2 * s * micro_batch * h, 2 * s * micro_batch * f
        four = "the input of silu and its result, the other factor of the product, and the input of the last linear"
        mistakes = {
            "x is counted twice: two linears read it, but it is one tensor in memory": true + x,
            f"a tensor of [s, b, f] is left out, one of four: {four}; the gradients need all of them": true - wide,
            "x is left out: the gradients of both first weights need it": true - x,
            f"two tensors of [s, b, f] are left out, of four: {four}": true - 2 * wide,
            f"three tensors of [s, b, f] are left out, of four: {four}": true - 3 * wide,
            "f is taken for 4h, but f is feed_forward_size": 17 * x,
            "elements are counted, not bytes": true // 2,
            "one tensor of [s, b, f] too many": true + wide,
        }
        if found != true and (mistake := named_value(found, mistakes)):
            raise Wrong(mistake)
        if found != true:
            raise Wrong(f"predicted {found:,} B, measured {true:,} B for s={s} b={micro_batch} h={h} f={f}")


def _keeps(b: Bench, s: int, micro_batch: int, h: int, f: int) -> int:
    """Bytes that the layer of the lab's file keeps, by the ledger."""
    weights = [torch.randn(size, dtype=torch.bfloat16) for size in ((f, h), (f, h), (h, f))]
    return kept(b, b["gated_mlp"], torch.randn(s, micro_batch, h, dtype=torch.bfloat16), weights).bytes


def check_crossover(b: Bench) -> None:
    for h, a in ((12288, 96), (20, 4), (1600, 25)):
        found = check_whole_number("the result", b["crossover_seq_length"](h, a))
        right = 34 * h // (5 * a) + 1
        mistakes = {
            "34h/5a is rounded down, and at that s the core attention does not keep more than the rest: the smallest s that does is the "
            "next whole number": right - 1,
            "h and a are swapped: wide heads make the core attention small beside the rest": 34 * a // (5 * h) + 1,
            "the dropout mask is left out of the core: softmax output 2, its dropout's mask 1, its dropout's output 2": 34 * h // (4 * a) + 1,
            "only the softmax output is counted: the dropout's mask and output belong to the core as well": 34 * h // (2 * a) + 1,
            "the core is compared with the rest of attention only; the MLP and the layer norms belong to the layer too": 11 * h // (5 * a) + 1,
        }  # fmt: skip
        if found != right and (mistake := named_value(found, mistakes)):
            raise Wrong(mistake)
        for s, more in ((found, True), (found - 1, False)):
            if s < 1:
                continue
            rows = measured(ModelShape(s, 1, h, a))
            core = sum(size for term, size in rows.items() if term in CORE_ATTENTION_TERMS)
            rest = sum(rows.values()) - core
            if (core > rest) != more:
                fault = "not more yet" if more else "more already"
                raise Wrong(
                    f"h={h} a={a}: at s={s} the core attention keeps {core:,} B and all else {rest:,} B, {fault}"
                )


def lab1_reward(b: Bench) -> Reward:
    """One layer of GPT-3 on one of 8 ranks in every configuration of table 2, as predicted and as counted."""
    shape = PAPER_MODELS["175B"].shape
    heads, micro_batch, h, s = shape.letters()
    cases = {
        "no parallelism": (1, False, "none"),
        "tensor": (8, False, "none"),
        "tensor + sequence": (8, True, "none"),
        "tensor + selective": (8, False, "selective"),
        "all three": (8, True, "selective"),
        "full recomputation": (8, False, "full"),
    }
    measures = []
    for name, case in cases.items():
        counted = sum(measured(shape, *case).values())
        measures.append(
            Measure(name, "B", {"yours": b["rank_bytes"](s, micro_batch, h, heads, *case), "measured": counted})
        )
        b.progress()
    crossover = b["crossover_seq_length"](h, heads)
    remark = f"From s={crossover:,} on, the core attention keeps more than all else in such a layer; GPT-3 has s={s:,}."
    return BarsReward(
        "One layer of GPT-3 on one of 8 ranks, as you predict it and as a real layer keeps it",
        tuple(measures),
        remark,
        one_scale=True,
    )
