"""Lab 1: for which sizes numbers are compared, and the mistakes that are edits of ours, which measurement agrees with."""

from __future__ import annotations

from itertools import product

from actmem.config import ModelShape
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.parts import measure_layer
from actmem.parallel.groups import tensor_parallel
from actmem.rows import LAYER_TERMS, by_term
from actmem_course.judge.case import CaseRun
from actmem_course.judge.compare import check_whole_number
from actmem_course.judge.term_tables import Pairs, check_terms, checked_terms, explain_ratio, explain_sum

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
    (8, 1, 16, 4, 2), (8, 2, 32, 8, 4), (16, 1, 24, 4, 4), (16, 3, 16, 8, 8), (24, 1, 32, 4, 2), (8, 1, 64, 8, 8), (24, 2, 48, 8, 4),
    (16, 1, 80, 4, 2),
)  # fmt: skip
#: h, a.
CROSSOVERS = ((12288, 96), (20, 4), (1600, 25), (1536, 16), (4, 2))  # a rest of 4/10, none, 2/10, 8/10, 6/10


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


def layer_bytes(r: CaseRun) -> None:
    sizes = [dict(zip("abhs", shape.letters())) for shape in _SHAPES]
    found = [checked_terms(r["layer_bytes"](z["s"], z["b"], z["h"], z["a"]), LAYER_TERMS) for z in sizes]

    def fault(term: str, pairs: Pairs) -> str:
        letters = "abs" if "softmax" in term else "bhs"
        return f"{explain_ratio(pairs, sizes, letters)}{_reason(term, *pairs[0])}"

    check_terms(found, [measured(shape) for shape in _SHAPES], fault)


#: Why, where a term whose name ends so is so many times what it should be.
_REASONS = {
    ("mask", 2): "a mask takes 1 byte an element, not 2", ("mask", 1 / 8): "a mask takes 1 byte an element, not 1 bit",
    ("MLP dropout mask", 4): "this dropout acts on the MLP's result, h wide",
    ("QKV projection input", 3): "Q, K and V read one tensor, which is kept once",
    ("h→4h input", 4): "its input is h wide, its result 4h", ("GeLU input", 1 / 4): "it is 4h wide", ("4h→h input", 1 / 4): "it is 4h wide",
    ("mask", 1 / 2): "a mask takes 1 byte an element", ("", 1 / 2): "2 bytes an element", ("", 2): "2 bytes an element",
}  # fmt: skip


def _reason(term: str, found: int, true: int) -> str:
    said = (words for (name, times), words in _REASONS.items() if term.endswith(name) and abs(found - true * times) < 1)
    return next((f" ({words})" for words in said), "")


def rank_bytes(r: CaseRun) -> None:
    letters = [dict(zip("sbhat", sizes)) for sizes in _APART]
    for s, b, h, a, t, sequence_parallel, recompute in RANKS:
        apart = [
            check_whole_number("the result", r["rank_bytes"](*sizes, sequence_parallel, recompute)) for sizes in _APART
        ]
        case = f"t={t}, {'with' if sequence_parallel else 'without'} sequence parallelism, {recompute=}, {s=} {b=} {h=} {a=}"
        r.see_number(
            case,
            r["rank_bytes"](s, b, h, a, t, sequence_parallel, recompute),
            explain_sum(apart, letters, "sbh", "sbh/t", "sbh/t²", "as²b", "as²b/t", "as²b/t²"),
        )


def gated_mlp_bytes(r: CaseRun) -> None:
    found = [check_whole_number("the result", r["gated_mlp_bytes"](*sizes)) for sizes in GATED]
    words = explain_sum(found, [dict(zip("sbhf", sizes)) for sizes in GATED], "sbh", "sbf", "hf")
    for (s, b, h, f), number in zip(GATED, found):
        r.see_number(f"{s=} {b=} {h=} {f=}", number, words)


def crossover_seq_length(r: CaseRun) -> None:
    found = [check_whole_number("the result", r["crossover_seq_length"](h, a)) for h, a in CROSSOVERS]
    for (h, a), number in zip(CROSSOVERS, found):
        r.see_number(f"{h=} {a=}", number, _compared(found))


def _compared(found: list[int]) -> str:
    """Which bytes are the same at that length; "" if none are.  One side is right rather than none, and none is too large."""

    def unlikely(pair: tuple[int, int]) -> tuple[bool, int, int]:
        core, rest = pair
        return core > 6 or rest > 34, (core != 5) + (rest != 34), -core

    for core, rest in sorted(product(range(1, 17), range(1, 69)), key=unlikely):
        for more, words in ((1, "the first s at which"), (0, "the last s before")):
            if found == [rest * h // (core * a) + more for h, a in CROSSOVERS]:
                return f"{words} {core}as²b is more than {rest}sbh{_KEPT * ((core, rest, more) == (5, 34, 1))}"
    return ""


_BOTH, _ALL = "10 * sbh // cut + 24 * sbh // t", "return 2 * s * b * h + 4 * 2 * s * b * f"
_FULL = '    if recompute == "full":\\n        return 2 * sbh // cut\\n'
_WHOLE = (
    "the two layer-norm inputs, two block inputs and two masks (10sbh) are divided by t; without sequence parallelism every "
    "rank keeps them whole"
)
_SHARED = "10sbh is not divided by t: sequence parallelism shares layer norms and dropouts too"
_INPUT_WHOLE = "the layer's input is 2sbh on every rank without sequence parallelism"
_INPUT_SHARED = "the layer's input is cut by sequence parallelism, so it is 2sbh/t"
_SELECTIVE = "selective drops the three tensors of the core attention, 5as²b/t"
_PRODUCTS = "the products see all s tokens with sequence parallelism too: it cuts only 10sbh"
_FOUR = "the input of silu and its result, the other factor of the product, and the input of the last linear"
_KEPT = " (the core keeps the softmax output 2, its dropout's mask 1 and output 2; the rest is attention 11, the MLP 19, layer norms 4)"
_TIMES = "(5 * num_attention_heads)"
MISTAKES = {
    "1.2": f"""
        tensor_parallel_size if sequence_parallel else 1 -> tensor_parallel_size | {_WHOLE}
        tensor_parallel_size if sequence_parallel else 1 -> 1 | {_SHARED}
        10 * sbh // cut -> 10 * sbh // t | {_WHOLE}
        10 * sbh // cut -> 10 * sbh | {_SHARED}
        `return 2 * sbh // cut` -> return 2 * sbh // t | {_INPUT_WHOLE}
        `return 2 * sbh // cut` -> return 2 * sbh | {_INPUT_SHARED}
        `{_FULL}` ->  | this is what selective recomputation keeps; full recomputation keeps only the layer's input
        {_BOTH} -> 34 * sbh // t | {_WHOLE}
        return 2 * sbh // cut -> return sbh // cut ;; return {_BOTH} + core -> return ({_BOTH} + core) // 2 | elements are counted, not bytes
        return {_BOTH} + core -> return ({_BOTH} + core) // 2 | elements are counted, not bytes
        return {_BOTH} + core -> return (10 * sbh // cut + 24 * sbh // t if recompute == "none" else 7 * sbh // cut + 16 * sbh // t) + core | selective drops the core attention alone: the rest of the attention block, 3sbh + 8sbh/t, is kept
        return 2 * sbh // cut -> return 4 * sbh // cut ;; return {_BOTH} + core -> return 2 * ({_BOTH} + core) | all is counted twice: 34 and 5 are bytes already
        return {_BOTH} + core -> return 2 * ({_BOTH} + core) | all is counted twice: 34 and 5 are bytes already
        return {_BOTH} + core -> return 10 * sbh // cut + (24 if recompute == "none" else 18) * sbh // t + core | selective keeps Q, K and V: the core attention is made again from them
        core = 5 * a * s * s * b // t -> core = sbh * (5 * a * s // (h * t)) | 5as/ht is rounded down before it is multiplied by sbh: divide last
        s, b, h, a, t = seq_length, -> s, b, h, a, t = seq_length // (tensor_parallel_size if sequence_parallel else 1), ;; 10 * sbh // cut -> 10 * sbh ;; return 2 * sbh // cut -> return 2 * sbh | {_PRODUCTS}
        return 2 * sbh // cut -> return 4 * sbh // cut | full recomputation keeps one input of 2sbh a layer: the second layer norm's is made again
        ` if recompute == "none" else 0` ->  | this is what is kept without recomputation: {_SELECTIVE}
    """,
    "1.3": f"""
        return 2 * s -> return 4 * s | 4sbh are counted where 2sbh are kept: two linears read x, but it is kept once, and nothing keeps the result
        4 * 2 * s * b * f -> 3 * 2 * s * b * f | a tensor of [s, b, f] is left out, one of four: {_FOUR}; the gradients need all of them
        4 * 2 * s * b * f -> 2 * 2 * s * b * f | two tensors of [s, b, f] are left out, of four: {_FOUR}; the gradients need all of them
        4 * 2 * s * b * f -> 5 * 2 * s * b * f | a tensor of [s, b, f] too many is counted; four are kept: {_FOUR}
        return 2 * s -> return 3 * s | one sbh too many is counted. Is it a mask? gated_mlp has no dropout
        return 2 * s * b * h + 4 -> return 4 | x is left out: the gradients of both first weights need it
        4 * 2 * s * b * f -> 4 * 2 * s * b * 4 * h | 4h is used in place of f, which is feed_forward_size
        {_ALL} -> return s * b * h + 4 * s * b * f | elements are counted, not bytes
    """,
    "1.4": f"""
        34 * hidden_size // {_TIMES} + 1 -> 34 * hidden_size // {_TIMES} + 2 | one too many: at s − 1 the core attention already keeps more than the rest
        34 * hidden_size // {_TIMES} -> 5 * num_attention_heads // (34 * hidden_size) | the quotient is upside down: 5as is more than 34h from s = 34h/5a on
        {_TIMES} + 1 -> {_TIMES} | 34h/5a is rounded down, and at that s the core attention does not keep more than the rest: the smallest s that does is the next whole number
        34 * hidden_size // {_TIMES} + 1 -> -(-34 * hidden_size // {_TIMES}) | 34h/5a is rounded up; where it is whole, the core attention keeps as much as the rest at that s, not more
        34 * hidden_size // {_TIMES} + 1 -> round(34 * hidden_size / {_TIMES}) + 1 | 34h/5a is rounded to the nearest whole number: round down, and take the next
        34 * hidden_size // {_TIMES} -> 34 // 5 * hidden_size // num_attention_heads | 34/5 is rounded down before it is multiplied by h: divide last
        34 * hidden_size // {_TIMES} -> 34 * hidden_size * num_attention_heads // 5 | 34h/5 is multiplied by a: divide by it, because more heads make the core attention larger
        34 * hidden_size // {_TIMES} + 1 -> -(-34 * hidden_size // {_TIMES}) + 1 | 34h/5a is rounded up, and 1 is added: round down, and take the next
        34 * hidden_size // {_TIMES} -> 34 * num_attention_heads // (5 * hidden_size) | h and a are swapped: wide heads make the core attention small beside the rest
        34 * hidden_size // {_TIMES} + 1 -> round(34 * hidden_size / {_TIMES}) | 34h/5a is rounded to the nearest whole number: round down, and take the next
    """,
}
