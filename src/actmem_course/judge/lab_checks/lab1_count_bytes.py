"""Lab 1's table of a layer, judged by what real layers keep.

No case: a wrong number is explained by its ratio to the measured one, however the formula is written.
"""

from __future__ import annotations

from actmem.config import ModelShape
from actmem.measure.emulate import emulated_rank
from actmem.measure.parts import measure_layer
from actmem.models import PAPER_MODELS
from actmem.parallel.groups import tensor_parallel
from actmem.rows import LAYER_TERMS, by_term
from actmem_course.judge.lab_checks.ratios import check_terms, checked_terms, explain_ratio
from actmem_course.judge.reward import BarsReward, Measure, Reward
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
        found.append(checked_terms(b["layer_bytes"](s, micro_batch, h, heads), LAYER_TERMS))
        true.append(measured(shape))
    sizes = [dict(zip("abhs", shape.letters())) for shape in _SHAPES]

    def fault(term: str) -> str:
        pairs = [(f[term], t[term]) for f, t in zip(found, true)]
        return f"{term} {explain_ratio(pairs, sizes, _letters(term))}{_reason(term, *pairs[0])}"

    check_terms([term for term in LAYER_TERMS if any(f[term] != t[term] for f, t in zip(found, true))], fault)


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
