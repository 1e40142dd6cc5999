"""Tables of bytes by term, of labs 1 and 7: judged by what real layers keep, and by formulas that measurement agrees with.

No cases: a wrong number is explained by its ratio to the right one, however the formula is written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from actmem.config import ModelShape, Parallel
from actmem.formulas.llama_terms import llama_rows
from actmem.llama_shape import TINY_LLAMA, LlamaShape
from actmem.measure.emulate import emulated_rank
from actmem.measure.parts import measure_layer
from actmem.models import PAPER_MODELS
from actmem.parallel.groups import tensor_parallel
from actmem.rows import LAYER_TERMS, by_term
from actmem_course.judge.compare import another_kind, check_whole_number
from actmem_course.judge.reward import BarsReward, Measure, Reward
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench

_CONSTANTS = {Fraction(n) for n in (1, 2, 4, 8, 16, 3, 6)} | {Fraction(1, n) for n in (1, 2, 4, 8, 16, 3, 6)}
#: No more letters than this are wrong at once, a square counting as two.
_MOST_LETTERS = 4


def checked_terms(answer: Any, names: Sequence[str]) -> dict[str, int]:
    """A learner's bytes by name.  Raises Wrong unless these are the names, and whole numbers."""
    if not isinstance(answer, Mapping):
        raise another_kind("a dict of bytes by name", answer)
    missing, unknown = [n for n in names if n not in answer], [str(n) for n in answer if n not in names]
    if missing or unknown:
        parts = [f"missing {', '.join(missing)}"] * bool(missing) + [f"not among them {', '.join(unknown)}"] * bool(
            unknown
        )
        raise Wrong(f"expected exactly the {len(names)} names: {'; '.join(parts)}")
    return {term: check_whole_number(term, value) for term, value in answer.items()}


def check_terms(wrong: Sequence[str], fault: Callable[[str], str]) -> None:
    """Raise Wrong with what is wrong in the first two terms, and how many more are."""
    more = len(wrong) - 2
    if wrong:
        said = "; ".join(map(fault, wrong[:2]))
        raise Wrong(said + f"; {more} more {'terms are' if more > 1 else 'term is'} wrong" * (more > 0))


def explain_ratio(pairs: Sequence[tuple[int, int]], sizes: Sequence[Mapping[str, int]], has: str) -> str:
    """How found values relate to true ones, as a product of small powers of the letters: ``lacks the factor a``.

    pairs: found and true for each case.  sizes: the value of each letter in it.  has: the letters of the
    true value: what the found one lacks is one of them.
    """
    powers = itertools.product(range(-2, 3), repeat=len(sizes[0]))
    near = [exponents for exponents in powers if sum(map(abs, exponents)) <= _MOST_LETTERS]
    for exponents in sorted(near, key=lambda e: sum(map(abs, e))):
        constants = {Fraction(f, t) / _product(exponents, letters) for (f, t), letters in zip(pairs, sizes)}
        if len(constants) == 1 and constants <= _CONSTANTS:
            return _words(constants.pop(), dict(zip(sizes[0], exponents)), has)
    (found, true), letters = next((pair, z) for pair, z in zip(pairs, sizes) if pair[0] != pair[1])
    return f"is {found:,} B where {true:,} B are kept ({' '.join(f'{name}={n}' for name, n in letters.items())})"


def _product(exponents: Sequence[int], letters: Mapping[str, int]) -> Fraction:
    result = Fraction(1)
    for size, exponent in zip(letters.values(), exponents):
        result *= Fraction(size) ** exponent
    return result


def _words(constant: Fraction, powers: Mapping[str, int], has: str) -> str:
    lacking = [f"{letter}{'²' * (e == -2)}" for letter, e in powers.items() if e < 0 and letter in has]
    divided = [f"{letter}{'²' * (e == -2)}" for letter, e in powers.items() if e < 0 and letter not in has]
    surplus = [f"{letter}{'²' * (e == 2)}" for letter, e in powers.items() if e > 0]
    parts = []
    if lacking:
        parts.append(f"lacks the factor {'·'.join(lacking)}")
    if divided:
        parts.append(f"is divided by {'·'.join(divided)}, which it has nothing to do with")
    if surplus:
        parts.append(f"has the extra factor {'·'.join(surplus)}")
    if constant != 1:
        parts.append(f"is {constant} of what is kept" if constant < 1 else f"is {constant} times what is kept")
    return " and ".join(parts)


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


_NAMES = tuple(row.term for row in llama_rows(TINY_LLAMA))
#: By the end of a term's name: the letters in its size, and what many forget.
_SIZES = {
    "statistics": ("sbt", " (one number a token, in 4 bytes)"),
    "log-sum-exp": ("sbat", " (one number a query and head, in 4 bytes)"),
    "gate": ("sbft", " (it is f wide)"),
    "up": ("sbft", " (it is f wide)"),
    "down input": ("sbft", " (it is f wide)"),
    "": ("sbht", ""),
}
#: Diagnosis of K and V -> what they are then, from what they should be.
_HEADS = {
    "is divided by t where there are fewer heads than ranks: no head is cut, several ranks hold the same one; divide by "
    "min(t, k)": lambda true, a, k, t: true * min(t, k) // t,
    "is counted with all a heads; there are k key and value heads": lambda true, a, k, t: true * min(t, k) * a // (k * t),
    "is counted with all k heads where there are fewer heads than ranks: each rank holds one of them": lambda true, a, k, t: true * (k if t > k else 1),
    "is not divided: with t <= k each rank has k/t of the heads": lambda true, a, k, t: true * min(t, k),
}  # fmt: skip


def check_llama_layer_bytes(b: Bench) -> None:
    found, true, sizes = [], [], []
    for t in (1, 2, 4):
        # Few common factors, so that a wrong power of a letter shows; more heads than ranks, fewer (one, two), as many.
        for s, micro_batch, a, k, d, f in (
            (11, 3, 6, 3, 4, 26), (7, 2, 5, 0, 6, 34), (3, 5, 4, 0.5, 10, 22), (5, 4, 3, 1, 14, 38)
        ):  # fmt: skip
            letters = (s * t, micro_batch, a * t * d, a * t, int(k * t) or 1, f * t)
            true.append(by_term(llama_rows(LlamaShape(*letters), Parallel(t, sequence_parallel=True))))
            found.append(checked_terms(b["llama_layer_bytes"](*letters, t), _NAMES))
            sizes.append(dict(zip("sbhakft", (*letters, t))))
    wrong = [term for term in true[0] if any(f[term] != right[term] for f, right in zip(found, true))]
    check_terms(wrong, lambda term: _fault(term, [(f[term], right[term]) for f, right in zip(found, true)], sizes))


def _fault(term: str, pairs: list[tuple[int, int]], sizes: list[dict[str, int]]) -> str:
    for words, value in _HEADS.items() if term in ("K", "V") else ():
        if all(found == value(true, z["a"], z["k"], z["t"]) for (found, true), z in zip(pairs, sizes)):
            return f"{term} {words}"
    has, forgotten = next(words for ending, words in _SIZES.items() if term.endswith(ending))
    return f"{term} {explain_ratio(pairs, sizes, has)}{forgotten}"
