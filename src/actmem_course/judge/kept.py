"""What a learner's function keeps for backward: by the ledger, and by the census beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from actmem.measure.census import census
from actmem.measure.ledger import Ledger, record
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench


@dataclass(frozen=True)
class KeptBytes:
    """ledger: what went through autograd's hooks.  census_bytes: all that stayed alive."""

    ledger: Ledger
    census_bytes: int

    @property
    def bytes(self) -> int:
        """Bytes that the hooks saw."""
        return self.ledger.saved_bytes

    @property
    def hidden_bytes(self) -> int:
        """Bytes that stayed alive without the hooks seeing them; torch's own checkpoint keeps random-number states so."""
        states = sum(tensor.bytes for tensor in self.ledger.unsaved if tensor.kind == "generator state")
        return self.census_bytes - self.ledger.saved_bytes - states

    def largest(self, count: int = 2) -> str:
        """The largest tensors kept, with who saved them."""
        saved = sorted(self.ledger.saved, key=lambda tensor: -tensor.bytes)[:count]
        return ", ".join(f"{t.bytes:,} B by {t.op} at {t.line}" for t in saved)


class Call(nn.Module):
    """A function as a module whose parameters are the weights that must not count."""

    def __init__(self, function: Callable[[Tensor], Tensor], weights: Sequence[Tensor] = ()):
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(
            nn.Parameter(w.detach()) if not isinstance(w, nn.Parameter) else w for w in weights
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.function(x, *self.weights)
        if hasattr(y, "trigger_wait"):  # a functional collective holds its tensors until someone waits for it
            y.trigger_wait()
        return y


def kept(b: Bench, function: Callable[..., Tensor], x: Tensor, weights: Sequence[Tensor] = ()) -> KeptBytes:
    """Count what ``function(x, *weights)`` keeps; runs it twice.  The weights do not count."""
    module = Call(function, weights)

    def make_input() -> Tensor:
        return x.detach().clone().requires_grad_()

    with b.watching():
        with record(module) as ledger:
            y = module(make_input())
        if not isinstance(y, Tensor):
            raise Wrong("the result is None: is a return missing?")
        if y.grad_fn is None:
            raise Wrong("the result has no graph, so nothing before it gets a gradient")
        del y
        if x.device.type == "cuda":
            torch.cuda.synchronize()
        counted = census(module, make_input)
    return KeptBytes(ledger, counted)


def check_keeps(
    b: Bench,
    at_most: int,
    what: str,
    function,
    x: Tensor,
    weights: Sequence[Tensor] = (),
    more: str | Callable[[KeptBytes], str] = "",
) -> None:
    """Raise Wrong if the function keeps more than ``at_most`` bytes, or keeps some out of sight.

    what: what those bytes are, for the diagnosis.  more: what to say about too many, of what was found.  On groups that
    are not all ranks nothing is counted again: the bytes are those of all ranks, for another t.
    """
    if b.group_name:
        return
    found = kept(b, function, x, weights)
    # A DTensor's graph holds its device mesh, and that the numbers of the ranks.
    if found.hidden_bytes > 8 * b.size:
        raise Wrong(
            f"it keeps {found.hidden_bytes:,} B where no hook can see them (a tensor as an attribute of ctx, or in a "
            "closure): pass tensors to ctx.save_for_backward"
        )
    if found.bytes > at_most:
        more = more if isinstance(more, str) else more(found)
        enough = f"where {at_most:,} B are enough ({what})" if at_most else "and needs to keep nothing"
        raise Wrong(
            f"it keeps {found.bytes:,} B for backward {enough}{more and ': ' + more}. The largest: {found.largest()}"
        )
