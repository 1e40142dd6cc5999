"""Run a learner's function forward and backward, and look at everything it must not do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from actmem.measure.comms import Collective
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.virtual import Watch


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


def check_graph(result: Tensor, forward: Watch) -> None:
    """Raise Wrong unless backward can run from the result, through all that forward exchanged."""
    if not result.requires_grad:
        raise Wrong(
            "the result is right, but it has no graph, so nothing before it gets a gradient: "
            + (
                "autograd does not record the collectives of torch.distributed, so write a torch.autograd.Function with a forward "
                "and a backward"
                if forward.collectives
                else "is it computed under no_grad, or detached?"
            )
        )
    if forward.unrecorded:
        raise Wrong(
            f"{forward.unrecorded} runs on a tensor that autograd follows, and autograd does not record it: torch warns that the "
            "gradient may be silently wrong, and will refuse it. Run it in the forward of a torch.autograd.Function, whose "
            "backward says what the gradient is"
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
    why = f" ({assigned(backward)})" if backward.collectives else ""
    return f"the forward is right, but {name} gets no gradient: backward returns None for it{why}, or it is detached on the way"


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
    return f"the numbers are right, but {when} runs {text_of(found)}; expected {text_of(wanted)}"


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
