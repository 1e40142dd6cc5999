"""``CaseRun``: what a case uses to call the function under test and to record what it does, on one rank.

A case is a test of one exercise: a function that takes a ``CaseRun``.  It calls the function under test and records
observations: results, gradients, bytes, collectives.  The same case runs with the learner's functions, with those of
our solution, and with our solution after an edit that makes a stated mistake.
"""

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

#: What to tell a learner, by the name of an input whose gradient is wrong; "" stands for the result.  A text is the
#: repair, a fault has repair and cause.
Advice = Mapping[str, str | Fault]


class CaseRun:
    """One run of a case (the function that tests an exercise) on one rank.

    The case calls functions of the judged file (``run["f"]`` is its function f) and records what it observes.
    Observations of the learner's file are compared later with those of our solution.

    Random tensors depend only on the group and on how many tensors were drawn before.  So each rank can compute the
    tensors of the other ranks, and expected values need no collective.

    Args:
        functions: the names that the judged file defines, with their values.
        side: the rank on which the case runs: a ``VirtualRank`` or a ``RealRank``.
        subgroup: the name of the group that the functions are given, from ``name_of_subgroup``; "" for the group of all
            ranks.
        device: where tensors are made, "cpu" or "cuda".
        reference: the observations of another run on this rank, by name.  This run stops (raises Unlike) as soon as one
            of its own observations differs from the observation of that name in ``reference``.

    Attributes:
        rank: this rank's number in ``group``.
        t: how many ranks ``group`` has.
        group: the process group that the functions are given; None if there is none.
        members: the numbers of the group's ranks among all ranks, in the group's order.
        group_name: the group's name; "" for the group of all ranks.
        seen: the observations of this run so far, by name.
    """

    def __init__(
        self,
        functions: dict,
        side: Any,
        subgroup: str = "",
        device: str = "cpu",
        reference: Mapping[str, Observation] | None = None,
    ):
        self.functions, self.side, self.device = functions, side, device
        self.rank, self.t, self.members, self.group_name = side.number, side.size, list(range(side.size)), ""
        self.group = dist.group.WORLD if dist.is_initialized() else None
        if subgroup:
            self._join(subgroup)
        self.reference = reference
        self.seen: dict[str, Observation] = {}
        self._draws = 0
        #: Tensors that the file's functions were given, to find out whether they write to them: the parameter's name,
        #: the tensor, and a copy.  None while nobody wants to know.
        self._given: list[tuple[str, Tensor, Tensor]] | None = None

    def _join(self, name: str) -> None:
        """Join a group that is not all ranks in their order: code that forgets ``group`` is wrong there."""
        world = self.t
        step = world // 2 if world % 2 == 0 and world > 2 else 1
        ranks_of_groups = [list(range(first, world, step))[::-1] for first in range(step)]
        groups = [dist.new_group(members, **_UNSORTED) for members in ranks_of_groups]
        self.group = next(group for members, group in zip(ranks_of_groups, groups) if self.rank in members)
        self.members, self.group_name = dist.get_process_group_ranks(self.group), name
        self.t, self.rank = len(self.members), dist.get_rank(self.group)

    def __getitem__(self, name: str) -> Callable:
        """Return a function of the judged file, by its name.  Raises Wrong if the file has no function of that name.

        The returned function counts its calls; in a context of ``unwritten`` it also watches the tensors that it is
        given.
        """
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
        """Make a context that raises Wrong at its end if the learner's code has changed a tensor in place.

        It watches the tensors that are passed in the context to functions of the judged file.

        Args:
            tensors: further tensors to watch, by name.
        """
        self._given = self._given or []
        self._note(tensors)
        yield
        with no_dispatch_modes():
            for name, tensor, before in self._given:
                if not torch.equal(tensor.detach(), before):
                    raise Wrong(f"{name} is changed in place", "work on a copy", "it belongs to the caller")

    def watching(self) -> AbstractContextManager[Watch]:
        """Make a context that records the collectives that run in it.  At its end all ranks wait for each other.

        Yields: a ``Watch``, whose ``collectives`` lists what ran.
        """
        return self.side.watching(self.members if self.group_name else None)

    def gather(self, value: object) -> list:
        """Collect a Python value from every rank of the group; every rank must call this method.

        Args:
            value: this rank's value.

        Returns: the values, in the order of the group's ranks.

        Raises: PeerStopped if another rank has ended the case.
        """
        values = self.side.gather(value)
        return [values[member] for member in self.members]

    def _random(self, *sizes: int, seed: int = 0) -> Tensor:
        """Draw normal float64 numbers, the same ones on every rank of the group."""
        salt = 10**6 * (1 + min(self.members)) if self.group_name else 0
        generator = torch.Generator().manual_seed(seed + salt)
        return torch.randn(sizes, dtype=torch.float64, generator=generator).to(self.device)

    def same(self, *sizes: int) -> Tensor:
        """Draw a random float64 tensor of these sizes that is the same on every rank of the group."""
        self._draws += 1
        return self._random(*sizes, seed=self._draws)

    def each(self, *sizes: int) -> Tensor:
        """Draw a random float64 tensor of these sizes that is different on every rank of the group."""
        self._draws += 1
        return self._random(*sizes, seed=self._draws + 1000 * (self.rank + 1))

    def shard(self, *sizes: int, dim: int = 0) -> Tensor:
        """Draw a random tensor that is the same on every rank, and return this rank's shard of it.

        Args:
            sizes: the sizes of the unsharded tensor.
            dim: the dimension along which the ranks of the group share the tensor.
        """
        return self.same(*sizes).chunk(self.t, dim)[self.rank].contiguous()

    def see(self, seen: Observation) -> None:
        """Record an observation: a value that the case measured, to be compared with our solution's later.

        Args:
            seen: the observation; another one with the same name replaces it.

        Raises: Unlike if this run has a ``reference`` whose observation of the same name has another value or is
            missing.  For costs (bytes, collectives), where less is right too, it never raises.
        """
        self.seen[seen.name] = seen
        if self.reference is not None and seen.tells_apart and not seen.same_as(self.reference.get(seen.name)):
            raise Unlike(seen.name)

    def see_value(self, name: str, value: Any, repair: str = "", cause: str = "") -> None:
        """Record a value that is right only if it equals our solution's.

        Args:
            name: the value's name, with which a message to the learner begins: "the output's dtype".
            value: a number, a text, a tuple or anything else that == compares.
            repair: if the value is wrong, what the learner should do.
            cause: if the value is wrong, what may be the cause in the code.
        """
        self.see(ValueSeen(name, value, repair, cause))

    def see_cost(self, words: str, value: int, repair: str = "", cause: str = "", name: str = "") -> None:
        """Record a number that is right if it is no larger than our solution's, such as bytes.

        Args:
            words: the message if the learner's number is larger; "{found}" stands for this number, "{enough}" for our
                solution's.
            value: the number, such as bytes.
            repair: if the number is larger, what the learner should do.
            cause: if the number is larger, what may be the cause in the code.
            name: the observation's name; by default ``words``.  Give a name if the words differ from run to run.
        """
        self.see(Cost(name or words, value, repair, cause, words=words))

    def see_tensor(
        self, name: str, found: Any, advice: str | Fault = "", kind: type[TensorSeen] = TensorSeen, **more: Any
    ) -> None:
        """Record a tensor, to be compared with our solution's.

        Args:
            name: the tensor's name, with which a message to the learner begins: "the gradient of x".
            found: the tensor that the function returned or left behind, such as a .grad.
            advice: what to tell the learner if the tensor is wrong: a text says what to do; a ``Fault`` also has a
                cause.
            kind: ``TensorSeen`` or a subclass, which decides how close to our solution's tensor this one must be.
            more: further fields of ``kind``, such as ``gradient_of``, by name.

        Raises: Wrong if ``found`` is no tensor.
        """
        advice = _as_fault(advice)
        self.see(kind(name, check_plain_tensor(name, found).clone(), advice.repair, advice.cause, **more))

    def see_number(self, case: str, found: Any, meaning: str = "") -> None:
        """Record a whole number that a function returned.

        Args:
            case: a text with the arguments that the function was given: "s=16 b=2 h=32 f=96".
            found: what the function returned.
            meaning: the formula that gives the number, as a text, such as "34 · s · b · h"; "" if that isn't known.

        Raises: Wrong if ``found`` is no whole number.
        """
        self.see(ValueSeen(f"{case}: {RESULT}", check_whole_number(RESULT, found), meaning=meaning))

    def observe(
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
        allowed_extra: Sequence[Collective] = (),
        fault_if_reached_twice: Fault | None = None,
        frozen: Collection[str] = (),
    ) -> tuple[Watch, Watch]:
        """Run forward and backward of ``function(*tensors, *rest)``; record result, gradients and collectives.

        Args:
            function: the function under test.
            tensors: the function's first arguments, tensors by name; copies of them are passed.
            rest: the arguments that follow.
            upstream: the gradient of the result, with which backward starts; random if it is left out.
            kind: the class of observation for result and gradients, which decides how close to our solution's they must
                be.
            prefix: a text that describes the arguments, such as "for a bfloat16 x, "; every observation's name begins
                with it.
            advice: what to tell the learner if the result (key "") or an input's gradient (key: its name) is wrong.
            summed: names of inputs whose gradients must be right only in their sum over the ranks.
            operator: whether the function is a single collective.  A wrong result is then explained by how it can be
                made from the ranks' inputs.
            sends: how many bytes each pass may send, in any collectives; None if each pass must run the same
                collectives as our solution.
            allowed_extra: collectives that backward may run in addition to those of our solution.
            fault_if_reached_twice: the fault to report if backward reaches an input more than once; by default, that
                recomputation started from inputs that were not detached.
            frozen: names of inputs that require no gradient.

        Returns: the collectives that forward ran, and those that backward ran.
        """
        advice = advice or {}
        leaves = {name: x.detach().clone().requires_grad_(name not in frozen) for name, x in tensors.items()}
        inputs = {name: leaf * 1 for name, leaf in leaves.items()}  # autograd refuses to write to a leaf
        first, *_ = tensors.values()
        self._given = []
        with self.unwritten(**inputs), self.watching() as forward:
            result = function(*inputs.values(), *rest)
        _check_returned(result, forward)
        # On several ranks a wrong value can come from a wrong collective, which the advice may know nothing of.
        extra_fields: dict[str, Any] = {"advice_is_certain": self.t == 1, "parts": first if operator else None}
        self.see_tensor(f"{prefix}{RESULT}", result, advice.get("", ""), kind, **extra_fields)
        if sends:
            self._see_sent(sends, f"{prefix}forward", "the result is right", forward)
        elif self.t > 1:
            self.see(CollectivesRun(f"{prefix}forward", list(forward.collectives)))
        check_graph(result, forward, prefix)
        upstream = self.each(*result.shape).to(result.dtype) if upstream is None else upstream
        given = upstream.clone()
        trainable = {name: x for name, x in inputs.items() if name not in frozen}
        with self.unwritten(**{"the gradient that backward is given": given}), self.watching() as backward:
            with reached_once(trainable.values(), fault_if_reached_twice or _WITH_GRAPH):
                result.backward(given)
        self._given = None
        check_waited(forward, backward)
        _check_no_grad_is_set(trainable)
        for name in trainable:
            gradient, gradient_advice = leaves[name].grad, _as_fault(advice.get(name, ""))
            # What backward's collective made is the first input's gradient.
            ran = backward if first is tensors[name] else Watch()
            missing = "" if gradient is not None else gives_no_gradient(ran)
            value, parts = None if gradient is None else gradient.clone(), upstream if operator else None
            extra_fields |= {"gradient_of": name, "parts": parts, "missing": missing, "backward": f"{prefix}backward"}
            of_kind = SummedTensor if name in summed else kind
            words = f"{prefix}the gradient of {name}"
            self.see(of_kind(words, value, gradient_advice.repair, gradient_advice.cause, **extra_fields))
        if sends:
            self._see_sent(sends, f"{prefix}backward", "the numbers are right", backward)
        elif self.t > 1:
            run, returns = list(backward.collectives), result_of(backward)
            self.see(CollectivesRun(f"{prefix}backward", run, "", "", True, returns, allowed_extra))
        return forward, backward

    def _see_sent(self, enough: Cost, when: str, right: str, ran: Watch) -> None:
        """Note how many bytes a pass sent, as a cost that is right if it is no more than ``enough.value``."""
        sent = max(enough.value, sum(collective.payload_bytes for collective in ran.collectives))
        words = f"{when} sends {{found:,}} B"
        self.see(replace(enough, name=f"the bytes that {when} sends", value=sent, words=words, right=right))

    def operator(self, name: str, x: Tensor, advice: Advice, upstream: Tensor | None = None) -> None:
        """Test an operator that is a single collective, such as f or g, and that it saves nothing for backward.

        It runs forward and backward twice, the second time with tensors that aren't contiguous.

        Args:
            name: the operator's name in the judged file, such as "f_bar".
            x: the operator's input, with at least three dimensions.
            advice: what to tell the learner if the result (key "") or the gradient (key "x") is wrong.
            upstream: the gradient of the result, with which backward starts; random if it is left out.
        """
        function = self[name]
        self.observe(function, {"x": x}, self.group, operator=True, advice=advice, upstream=upstream)
        upstream = self.each(*self.seen[RESULT].value.shape) if upstream is None else upstream
        x, upstream = (y.transpose(1, 2).contiguous().transpose(1, 2) for y in (x, upstream))
        prefix = "where x and its gradient are not contiguous, "
        self.observe(function, {"x": x}, self.group, operator=True, advice=advice, upstream=upstream, prefix=prefix)
        self.saves(lambda y: function(y, self.group), x, repair="save nothing: backward needs no tensor of forward's")

    def makes(
        self,
        function: Callable,
        tensors: Mapping[str, Tensor],
        upstream: Tensor | None = None,
        kind: type[TensorSeen] = TensorSeen,
        others: Sequence[Tensor] = (),
    ) -> dict[str, Largest]:
        """Run forward and backward of ``function(*tensors)``; record gradients, and measure what each pass allocates.

        Args:
            function: the function under test.
            tensors: the function's arguments, tensors by name; copies of them are passed, as leaves of the graph.
            upstream: the gradient of the result, with which backward starts; random if it is left out.
            kind: the class of observation for the gradients, which decides how close to our solution's they must be.
            others: further tensors that the function uses; like the arguments, they don't count as allocated.

        Returns: for "forward" and for "backward" a ``Largest``: the largest tensor that the pass allocated, and the
            most bytes alive at once.
        """
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
        """Record the peak of the bytes that a pass allocated, as a cost: a peak below ``enough`` is right too.

        Args:
            when: "forward" or "backward".
            made: what ``makes`` measured in this pass.
            enough: the largest peak that is right, in bytes.
            repair: if the peak is larger, what the learner should do.
            cause: if the peak is larger, what may be the cause in the code.
        """
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
        """Run ``function(x, *weights)``, and record what it saves for backward.

        Weights, ``others`` and states of random generators don't count.  On a subgroup it does nothing, because the
        bytes are the same there.

        Args:
            function: the function under test.
            x: the function's input.
            weights: the function's weights.
            what: the tensors that our solution saves, for the message: "x and 1/rms".
            repair: if the function saves more than these, what the learner should do.
            spare: how many bytes more than our solution's are allowed.
            others: further tensors that the function uses and that don't count.
            itself: whether it is wrong to save a copy of x instead of x.
        """
        if not self.group_name:
            saved = saved_bytes(function, x, weights, others, self.watching(), self.functions.get("__file__", ""))
            seen = saved.without_copies(repair) if itself else saved
            self.see(SavedForBackward("bytes", seen, repair, what=what, element_size=x.element_size(), spare=spare))


def name_of_subgroup(world: int) -> str:
    """Return the name of the subgroup on which exercises are judged in addition to the group of all ranks.

    Code that ignores its ``group`` argument is wrong there.  If the number of ranks is even and above 2, each subgroup
    has half of the ranks (of 4 ranks: 0 and 2, or 1 and 3); else the subgroup has all ranks.  The ranks are in reverse
    order.

    Args:
        world: how many ranks there are.

    Returns: a text for messages: "2 of 4 ranks", or "the ranks in another order".
    """
    return f"2 of {world} ranks" if world % 2 == 0 and world > 2 else "the ranks in another order"


#: torch before 2.10 always sorts a group's ranks.
_UNSORTED: dict[str, Any] = (
    {"sort_ranks": False} if "sort_ranks" in inspect.signature(dist.new_group).parameters else {}
)


def _as_fault(advice: str | Fault) -> Fault:
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


#: What is wrong if a checkpoint's second run has a graph that continues into what came before the checkpoint.
_WITH_GRAPH = Fault(
    "backward comes more than once to what made the inputs",
    "start the second run from x.detach().requires_grad_(x.requires_grad)",
    "the second run starts from inputs that still have their graph, so its backward continues into what came before",
)


@contextmanager
def reached_once(inputs: Iterable[Tensor], fault_if_reached_twice: Fault = _WITH_GRAPH) -> Iterator[None]:
    """Make a context for a backward pass that raises Wrong if the pass reaches an input's graph node more than once.

    Args:
        inputs: the inputs, which must not be leaves of the graph.
        fault_if_reached_twice: the fault to raise; by default, that recomputation started from inputs that were not
            detached.
    """
    reached = []
    for number, x in enumerate(inputs):
        assert x.grad_fn is not None
        x.grad_fn.register_prehook(lambda gradients, number=number: reached.append(number))

    def check(raised: bool = False) -> None:
        if raised or len(set(reached)) < len(reached):
            fault = fault_if_reached_twice
            raise Wrong(fault.symptom, fault.repair, fault.cause)

    try:
        yield
    except RuntimeError as error:  # the nodes before the inputs free their tensors the first time
        check("backward through the graph a second time" in str(error))
        raise
    check()


def check_graph(result: Tensor, forward: Watch, prefix: str = "") -> None:
    """Raise Wrong if a result has no autograd graph, or if forward ran a collective that autograd can't see.

    Args:
        result: the tensor that the function under test returned.
        forward: the collectives that ran meanwhile.
        prefix: a text that describes the arguments, such as "for a bfloat16 x, "; the message begins with it.
    """
    if not result.requires_grad:
        symptom = f"{prefix}the result is right, but it has no graph, so nothing before it gets a gradient"
        if not forward.collectives:
            raise Wrong(symptom, cause="is it computed under no_grad, or detached?")
        function = "write a torch.autograd.Function with both: of an nn.Module, nobody calls a backward"
        raise Wrong(symptom, function, "autograd does not record the collectives of torch.distributed")
    if forward.unrecorded:
        raise Wrong(
            f"{forward.unrecorded} runs on a tensor that needs a gradient, so the gradient may be wrong",
            "call it in the forward of a torch.autograd.Function whose backward you write, or call a function that has "
            "one. If no gradient passes there, give it x.detach()",
            "autograd does not record it",
        )


def check_waited(*seen: Watch) -> None:
    """Raise Wrong if a pass started a collective with async_op=True and never waited for its handle.

    Args:
        seen: for each pass, the collectives that ran in it.
    """
    for watch in seen:
        if watch.unwaited:
            raise Wrong(
                f"{watch.unwaited[0]} is started with async_op=True, and its result is read before it is there",
                "call handle.wait() first",
                "its handle is never waited for",
            )


def gives_no_gradient(backward: Watch) -> str:
    """Return a text with the likely reason why an input's gradient is None after a backward pass.

    Args:
        backward: the collectives that ran in the pass.
    """
    why = "backward returns None for it, or it is detached on the way, by .detach() or by nn.Parameter(…)"
    if not backward.collectives:
        return why
    return f"{why}. Or {assigned(backward)}"
