"""A run of a case on one rank.

A case is a function of a ``CaseRun``.  It calls the function under test, and says what it sees: results, gradients,
bytes, collectives.  The same case runs with the learner's functions, with ours, and with ours after an edit.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import wraps
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from actmem.ledger.comms import Collective
from actmem.torch_private import no_dispatch_modes
from actmem_course.judge.collective_outcomes import assigned, result_of
from actmem_course.judge.compare import check_plain_tensor, check_whole_number
from actmem_course.judge.observations import (
    RESULT,
    CollectivesRun,
    Cost,
    Observation,
    SavedForBackward,
    SummedTensor,
    TensorSeen,
    ValueSeen,
)  # fmt: skip
from actmem_course.judge.saved_bytes import Largest, saved_bytes
from actmem_course.judge.verdict import Fault, Unlike, Wrong, mend
from actmem_course.judge.virtual import Watch

#: What to do, or cause and repair, by the name of an input whose gradient is wrong; "" is the result.
Advice = Mapping[str, str | Fault]


class CaseRun:
    """One rank's run of a case.

    Args:
        functions: the names of the learner's file.
        side: the rank, virtual or real.
        subgroup: its name, if the functions are not given all ranks in their order.
        like: what another run saw on this rank; where this one sees something else, it ends.

    Attributes:
        rank, t, group, device: as the learner's functions see them.
        members: the ranks of ``group``, in its order, as numbers among all ranks.
        group_name: "" or a name for them.

    Random tensors depend only on the seed and the group, so each rank knows what the others of its group hold and
    expected values need no collective.
    """

    def __init__(
        self,
        functions: dict,
        side: Any,
        subgroup: str = "",
        device: str = "cpu",
        like: Mapping[str, Observation] | None = None,
    ):
        self.functions, self.side, self.device = functions, side, device
        self.rank, self.t, self.members, self.group_name = side.number, side.size, list(range(side.size)), ""
        self.group = dist.group.WORLD if dist.is_initialized() else None
        if subgroup:
            self._join(subgroup)
        self.like = like
        self.seen: dict[str, Observation] = {}
        self._draws = 0
        #: What the file's functions are given while somebody watches, by parameter, each with a copy from before.
        self._given: list[tuple[str, Tensor, Tensor]] | None = None

    def _join(self, name: str) -> None:
        """Be on a group that is not all ranks in their order: whoever forgets ``group`` shows there."""
        world = self.t
        step = world // 2 if world % 2 == 0 and world > 2 else 1
        made = [list(range(first, world, step))[::-1] for first in range(step)]
        groups = [dist.new_group(members, **_UNSORTED) for members in made]
        self.group = next(group for members, group in zip(made, groups) if self.rank in members)
        self.members, self.group_name = dist.get_process_group_ranks(self.group), name
        self.t, self.rank = len(self.members), dist.get_rank(self.group)

    def __getitem__(self, name: str) -> Callable:
        """The function of that name, of the file that is judged."""
        function = self.functions.get(name)
        if not callable(function):
            raise Wrong(f"the file no longer has a function {name}")
        if not isinstance(function, FunctionType):
            return function

        @wraps(function)
        def noting(*args, **kwargs):
            self.side.calling()
            if self._given is not None:
                self._note({**dict(zip(inspect.signature(function).parameters, args)), **kwargs})
            return function(*args, **kwargs)

        return noting

    def _note(self, given: Mapping[str, Any]) -> None:
        assert self._given is not None
        with no_dispatch_modes():
            self._given += [(k, x, x.detach().clone()) for k, x in given.items() if type(x) in (Tensor, nn.Parameter)]

    @contextmanager
    def unwritten(self, **tensors: Tensor) -> Iterator[None]:
        """Raise Wrong if the block writes to these tensors, or to any that a function of the file is given, now or
        before."""
        self._given = self._given or []
        self._note(tensors)
        yield
        with no_dispatch_modes():
            for name, tensor, before in self._given:
                if not torch.equal(tensor.detach(), before):
                    raise Wrong(f"{name} is changed in place", "work on a copy", "it belongs to the caller")

    def watching(self) -> AbstractContextManager[Watch]:
        """Run the learner's code in this: its collectives are noted, and all ranks wait for each other at its end."""
        return self.side.watching(self.members if self.group_name else None)

    def gather(self, value: object) -> list:
        """Every rank's ``value``, by rank, while a check runs; ends the check if another rank has ended its own."""
        values = self.side.gather(value)
        return [values[member] for member in self.members]

    def _random(self, *sizes: int, seed: int = 0) -> Tensor:
        """Normal float64 numbers, the same on every rank of the group."""
        salt = 10**6 * (1 + min(self.members)) if self.group_name else 0
        generator = torch.Generator().manual_seed(seed + salt)
        return torch.randn(sizes, dtype=torch.float64, generator=generator).to(self.device)

    def same(self, *sizes: int) -> Tensor:
        """Random numbers that are the same on every rank."""
        self._draws += 1
        return self._random(*sizes, seed=self._draws)

    def each(self, *sizes: int) -> Tensor:
        """Random numbers that differ from rank to rank."""
        self._draws += 1
        return self._random(*sizes, seed=self._draws + 1000 * (self.rank + 1))

    def shard(self, *sizes: int, dim: int = 0) -> Tensor:
        """This rank's part of random numbers."""
        return self.same(*sizes).chunk(self.t, dim)[self.rank].contiguous()

    def see(self, seen: Observation) -> None:
        """Note an observation; end where another run saw something else."""
        self.seen[seen.name] = seen
        if self.like is not None and seen.tells_apart and not seen.same(self.like.get(seen.name)):
            raise Unlike(seen.name)

    def see_value(self, name: str, value: Any, repair: str = "", cause: str = "") -> None:
        """Note what has one right value."""
        self.see(ValueSeen(name, value, repair, cause))

    def see_cost(self, words: str, value: int, repair: str = "", cause: str = "", name: str = "") -> None:
        """Note a number that may be smaller than ours.  words: the symptom, with {found} and {enough}.  name: where
        the words differ from run to run."""
        self.see(Cost(name or words, value, repair, cause, words=words))

    def see_tensor(
        self, name: str, found: Any, advice: str | Fault = "", kind: type[TensorSeen] = TensorSeen, **more: Any
    ) -> None:
        """Note a tensor.  Raises Wrong if it is none."""
        advice = _advised(advice)
        self.see(kind(name, check_plain_tensor(name, found).clone(), advice.repair, advice.cause, **more))

    def see_number(self, case: str, found: Any, meaning: str = "") -> None:
        """Note a whole number, the result for the arguments of ``case``.  Raises Wrong if it is none.  meaning: what
        it adds up."""
        self.see(ValueSeen(f"{case}: {RESULT}", check_whole_number(RESULT, found), meaning=meaning))

    def passes(
        self,
        function: Callable,
        tensors: Mapping[str, Tensor],
        *rest: Any,
        upstream: Tensor | None = None,
        kind: type[TensorSeen] = TensorSeen,
        prefix: str = "",
        advice: Advice | None = None,
        summed: Collection[str] = (),
        operator: bool = False,
        sends: Cost | None = None,
        again: Sequence[Collective] = (),
        twice: Fault | None = None,
        frozen: Collection[str] = (),
    ) -> tuple[Watch, Watch]:
        """Run forward and backward of ``function(*tensors, *rest)``, and see the result, every gradient, the
        collectives.

        Args:
            upstream: the gradient that backward starts from; random if it is left out.
            kind: how close tensors must be.
            prefix: of which arguments this is, before every name.
            advice: what to do about a wrong result or gradient.
            summed: inputs whose gradients add up over the ranks.
            operator: the function is one collective, so what it makes is told by the parts that it was given.
            sends: the bytes that a pass may send, in any collectives; None if it must run ours.
            again: what backward may run besides.
            twice: what is wrong where backward comes twice to an input.
            frozen: tensors that need no gradient.

        Returns:
            What forward and backward ran.
        """
        advice = advice or {}
        leaves = {name: x.detach().clone().requires_grad_(name not in frozen) for name, x in tensors.items()}
        inputs = {name: leaf * 1 for name, leaf in leaves.items()}  # autograd refuses to write to a leaf
        first, *_ = tensors.values()
        self._given = []
        with self.unwritten(**inputs), self.watching() as forward:
            result = function(*inputs.values(), *rest)
        _check_returned(result, forward)
        sure, parts = self.t == 1, first if operator else None
        self.see_tensor(f"{prefix}{RESULT}", result, advice.get("", ""), kind, parts=parts, sure=sure)
        if sends:
            self._see_sent(sends, f"{prefix}forward", "the result is right", forward)
        elif self.t > 1:
            self.see(CollectivesRun(f"{prefix}forward", list(forward.collectives)))
        check_graph(result, forward, prefix)
        upstream = self.each(*result.shape).to(result.dtype) if upstream is None else upstream
        given = upstream.clone()
        moving = {name: x for name, x in inputs.items() if name not in frozen}
        with self.unwritten(**{"the gradient that backward is given": given}), self.watching() as backward:
            with reached_once(moving.values(), *filter(None, [twice])):
                result.backward(given)
        self._given = None
        check_waited(forward, backward)
        _check_no_grad_is_set(moving)
        for name in moving:
            gradient, mended = leaves[name].grad, _advised(advice.get(name, ""))
            # What backward's collective made is the first input's gradient.
            ran = backward if first is tensors[name] else Watch()
            missing = "" if gradient is not None else gives_no_gradient(ran)
            value, parts = None if gradient is None else gradient.clone(), upstream if operator else None
            more = {"sure": sure, "gradient_of": name, "parts": parts, "missing": missing}
            of_kind = SummedTensor if name in summed else kind
            words = f"{prefix}the gradient of {name}"
            self.see(of_kind(words, value, mended.repair, mended.cause, backward=f"{prefix}backward", **more))
        if sends:
            self._see_sent(sends, f"{prefix}backward", "the numbers are right", backward)
        elif self.t > 1:
            run = list(backward.collectives)
            seen = CollectivesRun(f"{prefix}backward", run, in_backward=True, result=result_of(backward), again=again)
            self.see(seen)
        return forward, backward

    def _see_sent(self, enough: Cost, when: str, right: str, ran: Watch) -> None:
        sent = max(enough.value, sum(collective.payload_bytes for collective in ran.collectives))
        words = f"{when} sends {{found:,}} B"
        self.see(replace(enough, name=f"the bytes that {when} sends", value=sent, words=words, right=right))

    def operator(self, name: str, x: Tensor, advice: Advice, upstream: Tensor | None = None) -> None:
        """Both passes of an operator that is one collective, and that it saves nothing."""
        own = self[name]
        self.passes(own, {"x": x}, self.group, operator=True, advice=advice, upstream=upstream)
        again = self.each(*self.seen[RESULT].value.shape) if upstream is None else upstream
        x, again = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (x, again))
        prefix = "where x and its gradient are not contiguous, "
        self.passes(own, {"x": x}, self.group, operator=True, advice=advice, upstream=again, prefix=prefix)
        self.saves(lambda y: own(y, self.group), x, repair="save nothing: its backward needs no tensor of forward's")

    def makes(
        self,
        function: Callable,
        tensors: Mapping[str, Tensor],
        upstream: Tensor | None = None,
        kind: type[TensorSeen] = TensorSeen,
        others: Sequence[Tensor] = (),
    ) -> dict[str, Largest]:
        """What forward and backward of ``function(*tensors)`` make beside the tensors, which are leaves, as weights
        are, and ``others``."""
        leaves = [x.detach().clone().requires_grad_() for x in tensors.values()]
        file = self.functions.get("__file__", "")
        with Largest(*leaves, *others, file=file) as forward:
            result = function(*leaves)
        upstream = self.each(*result.shape).to(result.dtype) if upstream is None else upstream
        with Largest(*leaves, *others, result, upstream, file=file) as backward:
            result.backward(upstream)
        for name, leaf in zip(tensors, leaves):
            self.see_tensor(f"if {name} is a leaf, its gradient", leaf.grad, "return it, and set no .grad", kind)
        return {"forward": forward, "backward": backward}

    def see_peak(self, when: str, made: Largest, enough: int, repair: str, cause: str = "") -> None:
        """See what lives at once, in forward or in backward, of what ``makes`` returned."""
        words = f"in {when} {{found:,}} B live at once, where {{enough:,}} are enough. Most of it: {made.most()}"
        self.see_cost(words, max(enough, made.peak), repair, cause, f"the peak of {when}")

    def saves(
        self,
        function: Callable,
        x: Tensor,
        *weights: Tensor,
        what: str = "",
        repair: str = "",
        spare: int = 0,
        others: Sequence[Tensor] = (),
        itself: bool = False,
    ) -> None:
        """What stays for backward, beside the weights, ``others`` and states of generators; on all ranks in their
        order only.

        what: what our bytes are.  spare: so many bytes more than ours are right, too.  itself: a copy of x isn't.
        """
        if not self.group_name:
            found = saved_bytes(function, x, weights, others, self.watching(), self.functions.get("__file__", ""))
            seen = found.without_copies(repair) if itself else found
            self.see(SavedForBackward("bytes", seen, repair, what=what, element_size=x.element_size(), spare=spare))


def name_of_subgroup(world: int) -> str:
    """What to call every second rank, the last first; where these are none or one, all ranks, the last first."""
    return f"2 of {world} ranks" if world % 2 == 0 and world > 2 else "the ranks in another order"


#: torch before 2.10 always sorts a group's ranks.
_UNSORTED: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
)


def _advised(advice: str | Fault) -> Fault:
    return mend(advice) if isinstance(advice, str) else advice


def _check_returned(result: Any, forward: Watch) -> None:
    if result is not None:
        check_waited(forward)
    elif forward.collectives:
        raise Wrong(f"{RESULT} is None", cause=f"is a return missing? Or {assigned(forward)}")


def _check_no_grad_is_set(inputs: Mapping[str, Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no leaf, so autograd leaves no .grad there: torch warns whoever asks
        set_by_hand = [name for name, x in inputs.items() if x.grad is not None]
    if set_by_hand:
        raise Wrong(f"backward writes to the .grad of {set_by_hand[0]}", "return the gradient, and autograd adds it")


#: What is wrong where a second run's backward goes on into what came before.
_WITH_GRAPH = Fault(
    "backward comes more than once to what made the inputs",
    "start the second run from x.detach().requires_grad_(x.requires_grad)",
    "the second run starts from inputs that still have their graph, so its backward continues into what came before",
)


@contextmanager
def reached_once(inputs: Iterable[Tensor], twice: Fault = _WITH_GRAPH) -> Iterator[None]:
    """Raise Wrong if backward comes more than once through a node that made an input: the second run's backward went
    on there."""
    reached = []
    for number, x in enumerate(inputs):
        assert x.grad_fn is not None
        x.grad_fn.register_prehook(lambda gradients, number=number: reached.append(number))

    def check(again: bool = False) -> None:
        if again or len(set(reached)) < len(reached):
            raise Wrong(twice.symptom, twice.repair, twice.cause)

    try:
        yield
    except RuntimeError as error:  # what came before lets go of its tensors the first time
        check("backward through the graph a second time" in str(error))
        raise
    check()


def check_graph(result: Tensor, forward: Watch, prefix: str = "") -> None:
    """Raise Wrong unless backward can run from the result, through all that forward ran.  prefix: of which input."""
    if not result.requires_grad:
        symptom = f"{prefix}the result is right, but it has no graph, so nothing before it gets a gradient"
        if not forward.collectives:
            raise Wrong(symptom, cause="is it computed under no_grad, or detached?")
        function = "write a torch.autograd.Function with both: of an nn.Module, nobody calls a backward"
        raise Wrong(symptom, function, "autograd does not record the collectives of torch.distributed")
    if forward.unrecorded:
        raise Wrong(
            f"{forward.unrecorded} runs on a tensor that needs a gradient, so the gradient may be wrong",
            "call it in the forward of a torch.autograd.Function, and write the backward. If no gradient passes there, "
            "give it x.detach()",
            "autograd does not record it",
        )


def check_waited(*seen: Watch) -> None:
    """Raise Wrong if nobody waits for a collective."""
    for one in seen:
        if one.unwaited:
            raise Wrong(
                f"{one.unwaited[0]} is started with async_op=True, and its result is read before it is there",
                "call handle.wait() first",
                "its handle is never waited for",
            )


def gives_no_gradient(backward: Watch) -> str:
    """Why a gradient may be None."""
    why = "backward returns None for it, or it is detached on the way, as an nn.Parameter made of it is"
    if not backward.collectives:
        return why
    return f"{why}. Or {assigned(backward)}"
