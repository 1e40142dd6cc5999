"""Lab 7: its cases, the functions that test a learner's answers."""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from actmem.config import Parallel
from actmem.rows import by_term
from actmem_course.judge.case import Advice, CaseRun
from actmem_course.judge.compare import check_tensors
from actmem_course.judge.observations import Clue, HalfTensor
from actmem_course.judge.term_tables import Pairs, check_terms, checked_terms, explain_ratio
from actmem_course.judge.verdict import Fault, Wrong, mend
from actmem_more.llama_shape import TINY_LLAMA, LlamaShape
from actmem_more.llama_terms import llama_rows

#: The norm's epsilon, so large that the result changes if it stands in a wrong place.
_EPS = 0.25
_IN_WIDE = mend("compute in wide(x), in forward and in backward", "the square of 300 overflows float16")
_ADD_UP = mend("add the tokens up in wide(x)", "in bfloat16, 256 and 1 are 256")
_NAMES = ("q_weight", "k_weight", "v_weight", "projection_weight")


_TERMS = tuple(row.term for row in llama_rows(TINY_LLAMA))
#: By how a term's name ends: the letters that its bytes have as factors, and what is often forgotten.
_SIZES = {
    "statistics": ("sbt", "one number a token, in 4 bytes"),
    "log-sum-exp": ("sbat", "one number a query and head, in 4 bytes"),
    "gate": ("sbft", "it is f wide"),
    "up": ("sbft", "it is f wide"),
    "down input": ("sbft", "it is f wide"),
    "": ("sbht", ""),
}
#: Mistakes in the bytes of K and V: the symptom and the cause, and what the bytes are with it, given the true ones.
_HEADS = {
    ("is divided by t where there are fewer heads than ranks", "several ranks hold the same head: divide by min(t, k)"):
        lambda true, a, k, t: true * min(t, k) // t,
    ("is counted with all a heads", "there are k key and value heads"):
        lambda true, a, k, t: true * min(t, k) * a // (k * t),
    ("is counted with all k heads where there are fewer heads than ranks", "each rank holds one of them"):
        lambda true, a, k, t: true * (k if t > k else 1),
    ("is counted with heads of h/k elements", "a head has h/a"): lambda true, a, k, t: true * a // k,
    ("is divided by k, also where t < k", "divide by min(t, k)"): lambda true, a, k, t: true * min(t, k) // k,
    ("is not divided", "with t <= k each rank has k/t of the heads"): lambda true, a, k, t: true * min(t, k),
}  # fmt: skip


def llama_layer_bytes(r: CaseRun) -> None:
    found, true, sizes = [], [], []
    for t in (1, 2, 4):
        # Few common factors, so that a wrong power of a letter shows; more heads than ranks, fewer (one, two), as many.
        for s, micro_batch, a, k, d, f in (
            (11, 3, 6, 3, 4, 26), (7, 2, 5, 0, 6, 34), (3, 5, 4, 0.5, 10, 22), (5, 4, 3, 1, 14, 38)
        ):  # fmt: skip
            letters = (s * t, micro_batch, a * t * d, a * t, int(k * t) or 1, f * t)
            true.append(by_term(llama_rows(LlamaShape(*letters), Parallel(t, sequence_parallel=True))))
            found.append(checked_terms(r["llama_layer_bytes"](*letters, t), _TERMS))
            sizes.append(dict(zip("sbhakft", (*letters, t))))

    def fault(term: str, pairs: Pairs) -> Fault:
        for (words, cause), value in _HEADS.items() if term in ("K", "V") else ():
            if all(found == value(true, z["a"], z["k"], z["t"]) for (found, true), z in zip(pairs, sizes)):
                return Fault(words, cause=cause)
        of_heads = all(found * z["a"] == true * max(z["k"], z["t"]) for (found, true), z in zip(pairs, sizes))
        if term == "log-sum-exp" and of_heads:
            each = "each query head has its own, a/t on a rank"
            return Fault("is counted for the key and value heads", cause=each)
        has, forgotten = next(words for ending, words in _SIZES.items() if term.endswith(ending))
        return Fault(explain_ratio(pairs, sizes, has), cause=forgotten)

    check_terms(found, true, fault)


def rms_norm(r: CaseRun) -> None:
    def own(x: Tensor, weight: Tensor) -> Tensor:
        return r["rms_norm"](x, weight, _EPS)

    x, weight = r.each(5, 3, 8), r.each(8)
    r.observe(own, {"x": x, "weight": weight})
    r.observe(own, {"x": r.each(5, 3, 12), "weight": r.each(12)}, prefix="with h = 12, ")
    half, advice = {"x": (1000 * x).half(), "weight": weight.half()}, dict.fromkeys(("", "x", "weight"), _IN_WIDE)
    r.observe(own, half, kind=HalfTensor, prefix="for a float16 x, ", advice=advice)
    r.saves(own, x.bfloat16(), weight.bfloat16(), what="x, and 1/rms of each token")
    if "bytes" in r.seen:
        tokens = x[..., 0].numel()
        rounded = [s for s in r.seen["bytes"].value.saved if prod(s.shape) == tokens and s.bytes < 4 * tokens]
        r.see_cost("1/rms is saved in 16 bits, too few digits", len(rounded), "save it in the dtype of wide(x)")
    # The same row 300 times: in bfloat16, 256 of its gradients and one more are 256.
    leaf = torch.ones(8, device=r.device).bfloat16().requires_grad_()
    many = r.each(8).abs().bfloat16().expand(300, 1, 8)
    own(many, leaf).sum().backward()
    words = "for 300 equal rows in bfloat16, the gradient of weight"
    r.see_tensor(words, leaf.grad, _ADD_UP, HalfTensor, gradient_of="weight")


def swiglu(r: CaseRun) -> None:
    gate, up = r.each(5, 3, 8), r.each(5, 3, 8)
    r.observe(r["swiglu"], {"gate": gate, "up": up})
    r.saves(lambda both: r["swiglu"](both[0], both[1]), torch.stack([gate, up]).bfloat16(), what="gate and up")


def _weights(r: CaseRun) -> Iterator[tuple[str, int, int, dict[str, Tensor]]]:
    """Yield cases with fewer key and value heads than ranks, as many, and more.

    t divides a head's elements, so that code which shards a head by mistake runs too; and h is not a·d.

    Yields: the case in words, a, k, and the unsharded weights by name.
    """
    a, h, d = 4 * r.t, 12 * r.t, 2 * r.t
    shared = max(k for k in range(1, max(2, r.t)) if r.t % k == 0)  # of which ranks have to share some
    for k in sorted({1, shared, r.t, 2 * r.t, a}):
        heads, ranks = "head" if k == 1 else "heads", "rank" if r.t == 1 else "ranks"
        words = f"{k} key and value {heads} on {r.t} {ranks}: "
        sizes = ((a * d, h), (k * d, h), (k * d, h), (h, a * d))
        yield words, a, k, {name: r.same(*size) for name, size in zip(_NAMES, sizes)}


_READ = "its query heads read the key and value heads from rank · k // t on, so neighbours share one if t > k"
#: The advice on which part of each weight a rank takes.
_HEADS_OF: Advice = {
    "q_weight": "take a/t whole heads that follow each other, from rank · a/t on, along dimension 0",
    **dict.fromkeys(("k_weight", "v_weight"), mend("take those of the rank's query heads, each once", _READ)),
    "projection_weight": "heads are its inputs, so take those of the rank's query heads along dimension 1",
}


def split_grouped_heads(r: CaseRun) -> None:
    for words, a, k, unsharded in _weights(r):
        with r.watching():
            answer = r["split_grouped_heads"](*unsharded.values(), a, k, r.group)
        for name, part in zip(_NAMES, check_tensors(answer, f"this rank's {', '.join(_NAMES)}", 4)):
            r.see_tensor(f"{words}this rank's {name}", part, _HEADS_OF[name])


def sum_shared_gradients(r: CaseRun) -> None:
    for words, _, k, unsharded in _weights(r):
        parts, share = min(r.t, k), max(1, r.t // k)
        shards = {name: unsharded[name].chunk(parts)[r.rank * parts // r.t] for name in ("k_weight", "v_weight")}
        weights = {name: part.clone().requires_grad_() for name, part in shards.items()}
        gradients = {name: r.each(*part.shape) for name, part in shards.items()}
        for name, weight in weights.items():
            weight.grad = gradients[name].clone()
        with r.watching() as seen:
            r["sum_shared_gradients"](*weights.values(), k, r.group)
        r.see(Clue(f"{words}whether it runs a collective", bool(seen.collectives)))
        add = f"add up what the {share} ranks that share a key head computed, each from its own query heads"
        for name, weight in weights.items():
            if not torch.equal(weight.detach(), shards[name]):
                raise Wrong(f"{name} itself is changed", "change only its .grad")
            reason = add if share > 1 else mend("", "With t <= k no two ranks hold the same head")
            r.see_tensor(f"{words}{name}.grad", weight.grad, reason, parts=gradients[name])
