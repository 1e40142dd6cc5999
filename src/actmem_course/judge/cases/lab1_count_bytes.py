"""Lab 1: its cases, the functions that test a learner's answers.  Tests compare our answers with measurement."""

from functools import cache
from itertools import product

from actmem.config import ModelShape
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.measure_layer import measure_layer
from actmem.parallel.groups import tensor_parallel
from actmem.rows import LAYER_TERMS, by_term
from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import check_whole_number
from actmem_course.judge.term_tables import Pairs, check_terms, checked_terms, explain_ratio, explain_sum
from actmem_course.judge.verdict import Fault, Wrong

#: s, b, h, a, t, sequence_parallel, recompute.
RANKS = (
    (12, 3, 56, 8, 1, False, "none"), (12, 3, 56, 8, 4, False, "none"), (12, 3, 56, 8, 4, True, "none"),
    (12, 3, 56, 8, 2, False, "selective"), (12, 3, 56, 8, 4, True, "selective"), (12, 3, 56, 8, 4, False, "full"),
    (12, 3, 56, 8, 4, True, "full"),
)  # fmt: skip
#: s, b, h, f.
GATED = ((5, 3, 8, 14), (7, 2, 10, 22), (3, 1, 6, 4), (2, 5, 4, 6))
#: s, b, h, a, t that t² divides, so that a sum of terms can be taken apart.
_APART = (
    (8, 1, 16, 4, 2), (8, 2, 32, 8, 4), (16, 1, 24, 4, 4), (16, 3, 16, 8, 8), (24, 1, 32, 4, 2), (8, 1, 64, 8, 8),
    (24, 2, 48, 8, 4), (16, 1, 80, 4, 2),
)  # fmt: skip
#: h, a.
CROSSOVERS = ((12288, 96), (20, 4), (1600, 25), (1536, 16), (4, 2))  # a rest of 4/10, none, 2/10, 8/10, 6/10


#: s, b, h, a that share no factor, so that every wrong power of one of them shows.
_SHAPES = (ModelShape(11, 3, 35, 5), ModelShape(7, 2, 39, 13), ModelShape(17, 5, 22, 2))


@cache
def measured(
    shape: ModelShape, tensor_parallel_size: int = 1, sequence_parallel: bool = False, recompute: str = "none"
) -> dict[str, int]:
    """Measure what the library's layer saves for backward on one emulated rank.

    Args:
        shape: the layer's sizes, unsharded.
        tensor_parallel_size: t.
        sequence_parallel: whether layer norms and dropouts are sharded among the t ranks as well.
        recompute: "none", "selective" or "full".

    Returns: the bytes of each of the paper's 15 tensors that is saved, by its name in LAYER_TERMS.
    """
    with emulated_rank(tensor_parallel_size):
        tp = tensor_parallel(sequence_parallel=sequence_parallel)
        rows = by_term(measure_layer(shape, tp, recompute))
    return {term: size for term, size in rows.items() if term in LAYER_TERMS}


def layer_bytes(r: CaseRun) -> None:
    sizes = [dict(zip("abhs", shape.letters())) for shape in _SHAPES]
    answers = [checked_terms(r["layer_bytes"](z["s"], z["b"], z["h"], z["a"]), LAYER_TERMS) for z in sizes]

    def fault(term: str, pairs: Pairs) -> Fault:
        letters = "abs" if "softmax" in term else "bhs"
        return Fault(explain_ratio(pairs, sizes, letters), cause=_reason(term, *pairs[0]))

    check_terms(answers, [measured(shape) for shape in _SHAPES], fault)


#: Why, where a term whose name ends so is so many times what it should be.
_REASONS = {
    ("mask", 2): "a mask takes 1 byte an element, not 2", ("mask", 1 / 8): "a mask takes 1 byte an element, not 1 bit",
    ("MLP dropout mask", 4): "this dropout acts on the MLP's result, h wide",
    ("QKV projection input", 3): "Q, K and V read one tensor, which is saved once",
    ("h→4h input", 4): "its input is h wide, its result 4h",
    ("GeLU input", 1 / 4): "it is 4h wide", ("4h→h input", 1 / 4): "it is 4h wide",
    ("mask", 1 / 2): "a mask takes 1 byte an element", ("", 1 / 2): "2 bytes an element", ("", 2): "2 bytes an element",
}  # fmt: skip


def _reason(term: str, found: int, true: int) -> str:
    why = (words for (name, times), words in _REASONS.items() if term.endswith(name) and abs(found - true * times) < 1)
    return next(why, "")


def rank_bytes(r: CaseRun) -> None:
    letters = [dict(zip("sbhat", sizes)) for sizes in _APART]
    two, four = (check_whole_number("the result", r["rank_bytes"](16, 3, 16, 8, t, False, "none")) for t in (2, 4))
    if two == four:
        raise Wrong("the result is the same with t=2 and t=4", "divide what is sharded by tensor_parallel_size")
    for s, b, h, a, t, sequence_parallel, recompute in RANKS:
        apart = [
            check_whole_number("the result", r["rank_bytes"](*sizes, sequence_parallel, recompute)) for sizes in _APART
        ]
        with_or_without = "with" if sequence_parallel else "without"
        case = f"t={t}, {with_or_without} sequence parallelism, {recompute=}, {s=} {b=} {h=} {a=}"
        r.see_number(
            case,
            r["rank_bytes"](s, b, h, a, t, sequence_parallel, recompute),
            explain_sum(apart, letters, "sbh", "sbh/t", "sbh/t²", "as²b", "as²b/t", "as²b/t²"),
        )


def gated_mlp_bytes(r: CaseRun) -> None:
    answers = [check_whole_number("the result", r["gated_mlp_bytes"](*sizes)) for sizes in GATED]
    words = explain_sum(answers, [dict(zip("sbhf", sizes)) for sizes in GATED], "sbh", "sbf", "hf")
    for (s, b, h, f), number in zip(GATED, answers):
        r.see_number(f"{s=} {b=} {h=} {f=}", number, words)


def crossover_seq_length(r: CaseRun) -> None:
    answers = [check_whole_number("the result", r["crossover_seq_length"](h, a)) for h, a in CROSSOVERS]
    for (h, a), number in zip(CROSSOVERS, answers):
        r.see_number(f"{h=} {a=}", number, _compared(answers))


def _compared(found: list[int]) -> str:
    """Which two sums of bytes the learner's answer is likely to have compared; "" if no pair gives these lengths.

    Pairs with one right side are tried first, and those with a coefficient larger than the paper's last.
    """

    def unlikely(pair: tuple[int, int]) -> tuple[bool, int, int]:
        core, rest = pair
        return core > 6 or rest > 34, (core != 5) + (rest != 34), -core

    for core, rest in sorted(product(range(1, 17), range(1, 69)), key=unlikely):
        for more, words in ((1, "the first s at which"), (0, "the last s before")):
            if found == [rest * h // (core * a) + more for h, a in CROSSOVERS]:
                right = (core, rest, more) == (5, 34, 1)
                return f"{words} {core}as²b is more than {rest}sbh{_KEPT if right else ''}"
    return ""


_KEPT = (
    " (the core saves the softmax output 2, its dropout's mask 1 and output 2; the rest is attention 11, the MLP 19, "
    "layer norms 4)"
)
