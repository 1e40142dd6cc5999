"""What an answer does on every rank, and where two answers differ.

A case is a function of a ``CaseRun``.  It calls the function under test, and says what it sees: results, gradients, bytes,
exchanges.  The same case runs with the learner's functions, with ours, and with ours after an edit.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from itertools import combinations
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from actmem.ledger.comms import Collective
from actmem.torch_private import no_dispatch_modes
from actmem_course.judge.compare import TOLERANCE, check_plain_tensor, check_whole_number, close, describe, summed
from actmem_course.judge.exchanged import OWN_PART, Operator, explain_exchange, made_of
from actmem_course.judge.kept import KeptBytes, Largest, counted, kept, tensor_text, too_much
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.virtual import Watch
from actmem_course.judge.workbench import Bench, check_unwritten

#: How things are compared that have a right value; the rest are costs, which one may pay in many ways.
NUMBERS = ("close", "near", "half", "bits", "total", "equal", "any", "pattern")
#: The tolerance of "near": many add 1e-6 to a norm before they divide by it.
_NEAR = 1e-5
#: So many tensors that ours does without, a sentence names.
_MOST_NAMED = 4


class Unlike(Exception):
    """This run does something else than the one that it is compared with, so nobody needs the rest of it."""


@dataclass
class Noted:
    """One thing that a rank saw.

    how: by which rule it must agree with ours: numbers up to rounding (close, near, half), to the bit (bits), only their
    sum over the ranks (total), values (equal), which of all ranks' values are the same (pattern; why:
    of two values' names and ranks, and whether they are the same, how late the sentence comes, and the sentence), no more (most, kept,
    and sent, which explains what is kept), exchanges.  Of several right ways, "any" is right, and tells mistakes apart.  why: for the sentence.  parts: what this rank had before an exchange.
    """

    name: str
    how: str
    value: Any
    why: Any = ""
    parts: Tensor | None = None


class CaseRun:
    """One rank's run of a case.  like: what another run saw on this rank; where this one sees something else, it ends."""

    def __init__(self, b: Bench, like: Mapping[str, Noted] | None = None):
        self.b, self.like, self.t, self.rank, self.group, self.device = b, like, b.size, b.rank, b.group, b.device
        self.seen: dict[str, Noted] = {}
        self._draws = 0
        #: What the file's functions are given while somebody watches, by parameter, each with a copy from before.
        self._given: list[tuple[str, Tensor, Tensor]] | None = None

    def __getitem__(self, name: str) -> Callable:
        """The function of that name, of the file that is judged."""
        function = self.b[name]
        if not isinstance(function, FunctionType):
            return function

        @wraps(function)
        def noting(*args, **kwargs):
            if self._given is not None:
                self._note({**dict(zip(signature(function).parameters, args)), **kwargs})
            return function(*args, **kwargs)

        return noting

    def _note(self, given: Mapping[str, Any]) -> None:
        assert self._given is not None
        with no_dispatch_modes():
            self._given += [(k, x, x.detach().clone()) for k, x in given.items() if type(x) in (Tensor, nn.Parameter)]

    @contextmanager
    def unwritten(self, **tensors: Tensor) -> Iterator[None]:
        """Raise Wrong if the block writes to these tensors, or to any that a function of the file is given, now or before."""
        self._given = self._given or []
        self._note(tensors)
        yield
        check_unwritten(self._given)

    def same(self, *sizes: int) -> Tensor:
        """Random numbers that are the same on every rank."""
        self._draws += 1
        return self.b.random(*sizes, seed=self._draws)

    def each(self, *sizes: int) -> Tensor:
        """Random numbers that differ from rank to rank."""
        self._draws += 1
        return self.b.random(*sizes, seed=self._draws + 1000 * (self.rank + 1))

    def shard(self, *sizes: int, dim: int = 0) -> Tensor:
        """This rank's part of random numbers."""
        return self.b.shards(self.same(*sizes), dim)[self.rank]

    def see(self, name: str, value: Any, how: str = "close", why: Any = "", parts: Tensor | None = None) -> None:
        """Note a value; see ``Noted``."""
        seen = self.seen[name] = Noted(name, how, value, why, parts)
        if self.like is not None and how in NUMBERS and how != "pattern" and not alike(self.like.get(name), seen):
            raise Unlike(name)

    def see_tensor(self, name: str, found: Any, how: str = "close", why: Any = "", parts: Tensor | None = None) -> None:
        """Note a tensor; raises Wrong if it is none."""
        self.see(name, check_plain_tensor(name, found).clone(), how, why, parts)

    def see_number(self, case: str, found: Any, sum_of: str = "") -> None:
        """Note a whole number; raises Wrong if it is none.  case: of which arguments it is the result; sum_of: what it adds up."""
        self.see(f"{case}: the result", check_whole_number("the result", found), "equal", sum_of)

    def passes(
        self,
        function: Callable,
        tensors: Mapping[str, Tensor],
        *rest: Any,
        upstream: Tensor | None = None,
        how: str = "close",
        prefix: str = "",
        why: Mapping[str, str] | None = None,
        total: Collection[str] = (),
        operator: bool = False,
        exchanges: bool = True,
        again: Sequence[Collective] = (),
        twice: str = "",
        still: Collection[str] = (),
    ) -> tuple[Watch, Watch]:
        """Forward and backward of ``function(*tensors, *rest)``: the result, every gradient, what is exchanged.

        why: what to do about a wrong result ("") or gradient, by its name.  total: gradients that add up over the ranks.
        again: what backward may exchange besides.  operator: the function only exchanges, so what it makes is told by the parts that it was given.
        twice: what to do where backward comes twice to an input.  still: tensors that need no gradient.  Returns what was exchanged.
        """
        why = why or {}
        leaves = {name: x.detach().clone().requires_grad_(name not in still) for name, x in tensors.items()}
        inputs = {name: leaf * 1 for name, leaf in leaves.items()}  # autograd refuses to write to a leaf
        self._given = []
        with self.unwritten(**inputs), self.b.watching() as forward:
            result = function(*inputs.values(), *rest)
        if result is None and forward.collectives:
            raise Wrong(f"the result is None: is a return missing, or {assigned(forward)}")
        if result is not None:
            check_waited(forward)
        first = next(iter(tensors.values()))
        self.see_tensor(f"{prefix}the result", result, how, why.get("", ""), first if operator else None)
        if exchanges and self.t > 1:
            self.see(f"{prefix}forward", list(forward.collectives), "exchanges")
        check_graph(result, forward, prefix)
        upstream = self.each(*result.shape).to(result.dtype) if upstream is None else upstream
        given = upstream.clone()
        moving = {name: x for name, x in inputs.items() if name not in still}
        with self.unwritten(**{"the gradient that backward is given": given}), self.b.watching() as backward:
            with reached_once(moving.values(), *filter(None, [twice])):
                result.backward(given)
        self._given = None
        check_waited(forward, backward)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no leaf, so autograd leaves no .grad there: torch warns whoever asks
            if set_by_hand := [name for name, x in moving.items() if x.grad is not None]:
                raise Wrong(
                    f"backward writes to the .grad of {set_by_hand[0]}: return the gradient, and autograd adds it"
                )
        for name in moving:
            leaf = leaves[name]
            what, rule = f"{prefix}the gradient of {name}", "total" if name in total else how
            # What backward exchanges is the first input's gradient.
            exchanged = backward if first is tensors[name] else Watch()
            reason = why.get(name, "") if leaf.grad is not None else prefix + gives_no_gradient(name, exchanged)
            self.see(
                what, None if leaf.grad is None else leaf.grad.clone(), rule, reason, upstream if operator else None
            )
        if exchanges and self.t > 1:
            self.see(f"{prefix}backward", list(backward.collectives), "exchanges", (_ran(backward), again))
        return forward, backward

    def operator(self, right: Operator, x: Tensor, upstream: Tensor | None = None) -> None:
        """Both passes of one of the four operators, and that it keeps nothing."""
        own, why = self[right.name], {"": right.in_forward, "x": right.in_backward}
        self.passes(own, {"x": x}, self.group, operator=True, why=why, upstream=upstream)
        self.keeps(lambda y: own(y, self.group), x, more="its backward needs no tensor of forward's")

    def makes(
        self,
        function: Callable,
        tensors: Mapping[str, Tensor],
        upstream: Tensor | None = None,
        how: str = "close",
        above: int = 0,
        others: Sequence[Tensor] = (),
    ) -> dict[str, Largest]:
        """What forward and backward of ``function(*tensors)`` make beside the tensors, which are leaves, as weights are, and ``others``."""
        leaves = [x.detach().clone().requires_grad_() for x in tensors.values()]
        file = self.b.functions.get("__file__", "")
        with Largest(*leaves, *others, file=file, above=above) as forward:
            result = function(*leaves)
        upstream = self.each(*result.shape).to(result.dtype) if upstream is None else upstream
        with Largest(*leaves, *others, result, upstream, file=file, above=above) as backward:
            result.backward(upstream)
        for name, leaf in zip(tensors, leaves):
            self.see_tensor(f"if {name} is a leaf, its gradient", leaf.grad, how, "return it, and set no .grad")
        return {"forward": forward, "backward": backward}

    def keeps(
        self,
        function: Callable,
        x: Tensor,
        *weights: Tensor,
        what: str = "",
        more: str = "",
        spare: int = 0,
        others: Sequence[Tensor] = (),
        itself: bool = False,
    ) -> None:
        """What stays for backward, beside the weights and ``others``; on all ranks in their order only.

        spare: so many bytes more than ours are right, too.  itself: a copy of x isn't.
        """
        if not self.b.group_name:
            found = kept(self.b, function, x, weights, others)
            seen = found.without_copies() if itself else found
            self.see("bytes", seen, "kept", (what, more, x.element_size(), spare))


def _ran(seen: Watch) -> str:
    """The collective of a pass in words, if it ran one that sums or joins; "" otherwise."""
    kinds = sorted({c.kind for c in seen.collectives} & {"all-reduce", "all-gather", "reduce-scatter"})
    return f"the {kinds[0]}" if len(kinds) == 1 else ""


@dataclass
class Happened:
    """By rank: what was seen, and the error that ended the run.  remark: what the case says of a right answer."""

    seen: list[dict[str, Noted]]
    errors: list[BaseException | None]
    remark: str = ""

    def value(self, name: str) -> list:
        """Every rank's; None where the run ended before."""
        return [own[name].value if name in own else None for own in self.seen]


def alike(a: Noted | None, b: Noted | None) -> bool:
    """Whether two runs saw the same, whatever is right.  None is not zero."""
    if a is None or b is None:
        return a is b
    x, y = a.value, b.value
    if isinstance(x, KeptBytes):
        return isinstance(y, KeptBytes) and x.as_much() == y.as_much()
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return bool(x is y or type(x) is type(y) and x == y)
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if a.how == "bits" or not (x.isfinite().all() and y.isfinite().all()):
        return torch.equal(torch.nan_to_num(x), torch.nan_to_num(y))
    if a.how == "near":
        return close(x, y, _NEAR)
    if a.how == "half":
        return _close_in_half(x, y)
    if x.dtype != torch.float64 or close(x, y, 1e-9):
        return close(x, y, 4 * torch.finfo(x.dtype).eps if x.dtype != torch.float64 else 1e-9)
    # Whoever computes in float32 makes the same mistakes, up to its digits.
    return (
        x.equal(x.float().double()) != y.equal(y.float().double()) and bool(x.any() and y.any()) and close(x, y, _NEAR)
    )


def _close_in_half(a: Tensor, b: Tensor) -> bool:
    """Equal up to two roundings to bfloat16, of 1/256 each, beside the largest value of ``b``."""
    scale = b.double().abs().max().clamp_min(1e-300)
    return close(a.double() / scale, b.double() / scale, 1e-2)


def differences(found: Happened, right: Happened) -> dict[str, list[int]]:
    """What is wrong, in the order in which it was seen, and on which ranks; bytes and exchanges of backward last."""
    wrong: dict[str, list[int]] = {}
    names = list(dict.fromkeys(name for own in right.seen for name in own))
    for name in sorted(names, key=lambda name: _LATER.get(right.seen[0][name].how, 0) + name.endswith("backward")):
        ranks = [k for k, own in enumerate(found.seen) if name in own and not _agrees(found, right, name, k)]
        if ranks:
            wrong[name] = ranks
    return wrong


#: What is sent explains what is kept, and that why much is alive.
_LATER = {"sent": 0.1, "kept": 0.2, "most": 0.5}


def _agrees(found: Happened, right: Happened, name: str, rank: int) -> bool:
    one, other = found.seen[rank][name], right.seen[rank][name]
    a, b, how = one.value, other.value, other.how
    if how in ("total", "pattern"):
        if any(name not in own for own in found.seen):
            return True  # a rank has ended before, and says why
        everyone, all_right = found.value(name), right.value(name)
        if how == "pattern":
            return _equal_pairs(everyone) == _equal_pairs(all_right)
        return all(value is not None for value in everyone) and close(summed(everyone), summed(all_right))
    if how == "any":
        return True
    if how in ("most", "sent"):
        return a <= b
    if how == "kept":
        return not too_much(a, b.bytes + sum(other.why[3:]), other.why[0], len(found.seen))
    if how == "exchanges":
        return not collectives_fault("", a, b, *other.why[1:])
    if not isinstance(b, Tensor):
        return bool(a == b)
    if not isinstance(a, Tensor) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    if how == "half":
        return bool(a.isfinite().all()) and _close_in_half(a, b)
    return torch.equal(a, b) if how == "bits" else close(a, b, _NEAR if how == "near" else TOLERANCE)


def _equal_pairs(everyone: Sequence[Mapping[str, Any]]) -> dict[tuple, bool]:
    """Which of all ranks' values are the same.  everyone: by rank, what was drawn, by its name."""
    drawn = {(name, rank): value for rank, own in enumerate(everyone) for name, value in own.items()}
    return {(a, b): drawn[a] == drawn[b] for a, b in combinations(sorted(drawn), 2)}


def described(found: Happened, right: Happened, wrong: Mapping[str, list[int]]) -> tuple[str, bool]:
    """How the first thing that is wrong differs, and whether that explains it: it comes of the ranks' parts, say."""
    name, ranks = next(iter(wrong.items()))
    t, each = len(found.seen), [_explained(found, right, name, rank) for rank in ranks]
    common = next((words for words in each[0] if all(words in other for other in each)), "")
    explained = bool(_exchanged(found, right, name, ranks[0])) and right.seen[0][name].how == "close"
    explained = explained or found.seen[ranks[0]][name].value is None
    if common or right.seen[0][name].how in ("total", "pattern"):
        some = f"on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: " * (len(ranks) < t)
        return some * (bool(common) and not re.search(r"ranks? \d", common)) + (common or each[0][0]), explained
    return f"on rank {ranks[0]}: " * (len(ranks) < t) + each[0][0], explained


def _explained(found: Happened, right: Happened, name: str, rank: int) -> list[str]:
    """What can be said of one rank's wrong value, the likelier first."""
    one, other = found.seen[rank][name], right.seen[rank][name]
    a, b, how, t = one.value, other.value, other.how, len(found.seen)
    forward = "the forward is right; " * ("the gradient" in name)
    if how == "pattern":
        pairs, wanted = _equal_pairs(found.value(name)), _equal_pairs(right.value(name))
        return [min(other.why(*pair, same) for pair, same in pairs.items() if same != wanted[pair])[1]]
    if how == "kept":
        what, more, element_size, *spare = other.why
        remedy = "; ".join(filter(None, (more, _beside(a, b, element_size, sum(spare)))))
        return [too_much(a, b.bytes + sum(spare), what, t, remedy)]
    if how in ("most", "sent"):
        many_ways = any(seen.how == "any" for seen in right.seen[rank].values())
        return ["the numbers are right, but " * (not many_ways) + (one.why or name).format(found=a, enough=b)]
    if how == "exchanges":
        return [collectives_fault(name, a, b)]
    if how == "total":
        everyone = found.value(name)
        if copied := _copies_apart(found, right, name):
            return [copied]
        if any(value is None for value in everyone):
            return [f"the forward is right, but {one.why}"]
        whole = f"{forward}{name}, summed over the ranks,"
        return [describe(whole, summed(everyone), summed(right.value(name)), t)]
    if not isinstance(b, Tensor):
        a, b = (f"{value:,}" if type(value) is int else value for value in (a, b))
        if one.why and one.why != other.why:
            return [f"{name} is {a}, which is {one.why}; expected {b}, which is {other.why}"]
        return [f"{name} is {a}; expected {b}" + f": {other.why}" * bool(one.why)]
    if copied := _copies_apart(found, right, name):
        return [copied]
    if a is None:
        return [one.why]
    if a.shape == b.shape and a.dtype != b.dtype:
        how = "round once, at the end" if a.dtype.itemsize > b.dtype.itemsize else "widen first, and don't round"
        return [f"{name} has dtype {_dtype(a)}; expected {_dtype(b)}: {how}"]
    for another, seen in right.seen[rank].items():
        if (
            another != name
            and isinstance(seen.value, Tensor)
            and seen.value.numel() > 1
            and a.any()
            and close(a, seen.value)
        ):
            return [
                f"{forward}{name} has the value of {re.split('[:,] ', another)[-1]}{f': {other.why}' * bool(other.why)}"
            ]
    if how == "half":
        return [f"right in float64, but {name} is not: {other.why}"]
    if how == "bits" and close(a, b):
        return [f"{forward}{name} is right up to rounding, but not bit for bit: use the same numbers"]
    said = [f"{forward}{name} {words}" for words in _exchanged(found, right, name, rank)]
    if not said and b.dtype == torch.float64 and close(a, b, 1e-5):
        return [f"{forward}{name} has the digits of float32: compute in the dtype of the input"]
    if said:
        return said
    differs = _with_exchanges(found, right, name, rank) + describe(forward + name, a, b, t, _sizes(right, rank))
    why = other.why if t == 1 else ""
    if why and " is wrong in " in differs:  # the cause comes before the rows
        return [f"{forward}{name} is wrong: {why}. It is wrong in {differs.partition(' is wrong in ')[2]}"]
    return [differs + f": {why}" * bool(why)]


def _sizes(right: Happened, rank: int) -> set[int]:
    """Over what a mean may be taken: dimensions of what a rank sees, and their products."""
    shapes = [seen.value.shape for seen in right.seen[rank].values() if isinstance(seen.value, Tensor)]
    return {n for shape in shapes for n in (*shape, math.prod(shape), math.prod(shape[:-1]))}


def _exchanged(found: Happened, right: Happened, name: str, rank: int) -> list[str]:
    """How a wrong tensor was made from the ranks' parts: from what they had before, or from the right ones."""
    value, ours, t = found.seen[rank][name].value, right.seen[rank][name], len(found.seen)
    if t == 1 or ours.how == "near" or not isinstance(value, Tensor) or not isinstance(ours.value, Tensor):
        return []
    if value.numel() < 2:  # any number is a multiple of another
        whole = describe("", value, ours.value, t).strip()
        added = whole.startswith("is t (") and all(part.equal(ours.value) for part in right.value(name))
        return [f"{whole}: every rank has the whole of it, and it is added up over the ranks"] * added
    if ours.parts is not None:
        parts = [part for own in right.seen if (part := own[name].parts) is not None]
        backward = found.seen[rank].get(name.partition("the gradient")[0] + "backward")
        ran = backward.why[0] if backward and "the gradient" in name else ""
        should = next((made for _, made in made_of(ours.value, parts, rank)), OWN_PART)
        return explain_exchange(value, parts, rank, should, ours.why, ran if should is not OWN_PART else "")
    parts = right.value(name)
    if all(close(part, parts[0]) for part in parts if part.shape == parts[0].shape):
        said = describe("", value, parts[rank], t)
        often = "it is added up over the ranks once too often"
        whole = often if "gradient" in name else "the result is the same on every rank"
        if "1/t" in said:
            whole = "it is the ranks' sum, not their mean"
        return [f"{said.strip()}: {whole}"] if said.endswith("what it should be") else []
    own = f"each rank's {name.rpartition('the gradient of ')[2]} is its own, so its gradient needs no exchange"
    alone = ours.why or (own if "gradient" in name else "each rank has its own, so exchange nothing here")
    said = describe("", value, parts[rank], sizes=_sizes(right, rank)).strip()
    if "a sum belongs" in said and f" 1/{t} " not in said:
        return [said]
    return explain_exchange(value, parts, rank, OWN_PART, alone)


def _copies_apart(found: Happened, right: Happened, name: str) -> str:
    """What to say of a bias that every rank has, and only some ranks use; "" if it is none."""
    rights = right.value(name)
    copies = right.seen[0][name].how == "total" or all(close(value, rights[0]) for value in rights)
    if "the gradient of" not in name or not copies or right.seen[0][name].parts is not None:
        return ""
    users = [rank for rank, value in enumerate(found.value(name)) if value is not None and value.any()]
    if not 0 < len(users) < len(rights):
        return ""
    what = name.rpartition("the gradient of ")[2]
    ranks = f"rank{'s' * (len(users) > 1)} {', '.join(map(str, users))}"
    return (
        f"the forward is right, but {what} is used on {ranks} only: the other ranks' {what} gets no gradient, and the copies "
        "drift apart. Add it on every rank, after the sum over the ranks"
    )


def _with_exchanges(found: Happened, right: Happened, name: str, rank: int) -> str:
    """Other exchanges than ours, before a result that nothing explains."""
    one, other = (outcome.seen[rank].get("forward") for outcome in (found, right))
    if name != "the result" or one is None or other is None or text_of(one.value) == text_of(other.value):
        return ""
    return f"forward runs {text_of(one.value)}; expected {text_of(other.value)}. And "


def _beside(found: KeptBytes, right: KeptBytes, element_size: int, spare: int) -> str:
    """Which tensors are kept that ours does without, and that are larger than what is allowed besides."""
    left, words = [(dtype, math.prod(shape)) for saved in right.saved for dtype, shape in saved.views], []
    for saved in sorted(found.saved, key=lambda saved: (-saved.given, -saved.bytes)):
        for dtype, shape in saved.views:
            if (view := (dtype, math.prod(shape))) in left:  # one keeps it flat, another in its shape
                left.remove(view)
                continue
            how = "a wider copy: widen again" if dtype.itemsize > element_size else "make it again"
            size = math.prod(shape) * dtype.itemsize
            if size <= spare:
                continue
            place = f" at {saved.line}" * bool(saved.line)
            words.append(f"{tensor_text(dtype, shape, size)} ({how} in backward){place}")
    words = counted(words)
    more = f"; and {len(words) - _MOST_NAMED} more" * (len(words) > _MOST_NAMED)
    return "not needed: " + "; ".join(words[:_MOST_NAMED]) + more if words and right.saved else ""


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@contextmanager
def reached_once(
    inputs: Iterable[Tensor],
    remedy: str = "the second run starts from inputs that still have their graph, so its backward continues into what came before: "
    "start it from x.detach().requires_grad_(x.requires_grad)",
) -> Iterator[None]:
    """Raise Wrong if backward comes more than once through a node that made an input: the second run's backward went on there."""
    reached = []
    for number, x in enumerate(inputs):
        assert x.grad_fn is not None
        x.grad_fn.register_prehook(lambda gradients, number=number: reached.append(number))

    def check(twice: bool = False) -> None:
        if twice or len(set(reached)) < len(reached):
            raise Wrong(remedy)

    try:
        yield
    except RuntimeError as error:  # what came before lets go of its tensors the first time
        check("backward through the graph a second time" in str(error))
        raise
    check()


def check_graph(result: Tensor, forward: Watch, prefix: str = "") -> None:
    """Raise Wrong unless backward can run from the result, through all that forward exchanged.  prefix: of which input."""
    if not result.requires_grad:
        raise Wrong(
            f"{prefix}the result is right, but it has no graph, so nothing before it gets a gradient: "
            + (
                "autograd does not record the collectives of torch.distributed, so write a torch.autograd.Function with a forward "
                "and a backward"
                if forward.collectives
                else "is it computed under no_grad, or detached?"
            )
        )
    if forward.unrecorded:
        raise Wrong(
            f"{forward.unrecorded} runs on a tensor that needs a gradient, and autograd does not record it, so the gradient may be wrong: "
            "call it in the forward of a torch.autograd.Function, and write the backward. If no gradient passes there, give it x.detach()"
        )


def check_waited(*seen: Watch) -> None:
    """Raise Wrong if nobody waits for a collective."""
    for one in seen:
        if one.unwaited:
            raise Wrong(
                f"{one.unwaited[0]} is started with async_op=True, and its handle is never waited for, so its result is read "
                "before it is there: call handle.wait() first"
            )


def gives_no_gradient(name: str, backward: Watch) -> str:
    """The sentence about a gradient that is None."""
    why = f". W{assigned(backward)[1:]}" if backward.collectives else ""
    return f"the forward is right, but {name} gets no gradient: backward returns None for it, or it is detached on the way{why}"


def assigned(seen: Watch) -> str:
    """A guess at where a None comes from, if a pass ran a collective."""
    name = f"dist.{seen.collectives[-1].kind.replace('-', '_')}"
    return f"was the result of {name} assigned? It writes into the tensor that it is given, and returns None"


def collectives_fault(
    when: str, found: Sequence[Collective], wanted: Sequence[Collective], again: Sequence[Collective] = ()
) -> str:
    """What is wrong with the collectives of a pass; "" if they are the ``wanted`` ones, in any order, or those and ``again``.

    A reduce-scatter and an all-gather of the same tensor stand for an all-reduce, which is made of them.
    """
    if any(c.kind == "reduce-scatter" for c in wanted):
        # Every rank's share to that rank, which adds them up itself: the same bytes.
        found = [Collective("reduce-scatter", c.payload_bytes) if c.kind == "all-to-all" else c for c in found]
    else:
        found = _joined(found)
    if sorted(map(str, found)) in (sorted(map(str, wanted)), sorted(map(str, [*wanted, *again]))):
        return ""
    if sorted(c.kind for c in found) == sorted(c.kind for c in wanted):
        sent, enough = sum(c.payload_bytes for c in found), sum(c.payload_bytes for c in wanted)
        return f"the numbers are right, but {when} exchanges {sent:,} B instead of {enough:,} B ({text_of(found)})"
    twice = {"all-reduce"} == {c.kind for c in found} and {"reduce-scatter"} == {c.kind for c in wanted}
    why = ", which sends half as much" * twice
    return f"the numbers are right, but {when} runs {text_of(found)}; expected {text_of(wanted)}{why}"


def _joined(collectives: Sequence[Collective]) -> list[Collective]:
    """Pairs of a reduce-scatter and an all-gather of one size as the all-reduce that they are."""
    left = list(collectives)
    for scatter in [c for c in left if c.kind == "reduce-scatter"]:
        gather = Collective("all-gather", scatter.payload_bytes)
        if gather in left:
            left.remove(scatter)
            left.remove(gather)
            left.append(Collective("all-reduce", scatter.payload_bytes))
    return left


def text_of(collectives: Sequence[Collective]) -> str:
    """How many of each kind, in words."""
    kinds = sorted(c.kind for c in collectives)
    counts = {kind: kinds.count(kind) for kind in kinds}
    parts = [f"{n} {kind}{'s' * (n > 1)}" for kind, n in counts.items()]
    return ", ".join(parts) or "no collective"
