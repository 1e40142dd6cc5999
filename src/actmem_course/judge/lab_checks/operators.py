"""How the four operators are judged: labs 2 and 3 write them, and the linears that use them."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor

from actmem_course.judge.kept import check_keeps
from actmem_course.judge.verdict import Wrong
from actmem_course.judge.workbench import Bench

#: What is taken for the course's gelu, and what to say of it.
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    'F.gelu is called without approximate="tanh": use gelu of actmem_course.pieces, which has the tanh formula': F.gelu,
    "relu is used instead of gelu": F.relu,
}


def size_of(x: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return x.numel() * x.element_size()


def check_keeps_nothing(b: Bench, function: Callable[..., Tensor], x: Tensor) -> None:
    """Raise Wrong if an operator keeps a tensor for backward."""
    check_keeps(b, 0, "", lambda y: function(y, b.group), x, more="its backward needs no tensor of forward's")


def check_bias_everywhere(b: Bench, gradient: Tensor | None, name: str) -> None:
    """Raise Wrong if only some ranks use a bias that is the same on every rank.  gradient: this rank's."""
    users = [rank for rank, used in enumerate(b.gather(gradient is not None and bool(gradient.any()))) if used]
    if 0 < len(users) < b.size:
        ranks = f"rank{'s' * (len(users) > 1)} {', '.join(map(str, users))}"
        raise Wrong(
            f"the forward is right, but {name} is used on {ranks} only: the other ranks' {name} gets no gradient, and the copies "
            "drift apart. Add it on every rank, after the sum over the ranks"
        )
