"""Lab 7: the bytes of a Llama layer, by the formulas that measurement agrees with to the byte."""

from __future__ import annotations

from actmem.config import Parallel
from actmem.formulas.llama_terms import llama_rows
from actmem.llama_shape import TINY_LLAMA, LlamaShape
from actmem.rows import by_term
from actmem_course.judge.lab_checks.ratios import check_terms, checked_terms, explain_ratio
from actmem_course.judge.workbench import Bench

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
