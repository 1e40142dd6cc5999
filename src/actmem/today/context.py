"""Context parallelism: c ranks share a sequence from end to end, and attention still reads all of it.

Everything but attention works on one token at a time, so a rank needs only its own s/c tokens.  Attention
needs the others' keys and values.  Two ways to get them:

    gather     all-gather K and V along the sequence, as Llama 3 does (2407.21783 section 3.3.2)
    ulysses    all-to-all from tokens to heads and back: each rank attends over all tokens with 1/c of
               its heads (DeepSpeed Ulysses, 2309.14509)

Gather cuts the sequence into 2c chunks and gives rank i chunks i and 2c - 1 - i: under a causal mask an
early chunk sees few keys and a late one many, and each such pair sees the same number.  Ulysses needs no
such order: every rank sees every token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function

from actmem.checks import check_choice
from actmem.llama_shape import CONTEXT_KINDS
from actmem.main_grad import gradient_of
from actmem.parallel.collectives import all_gather, reduce_scatter, start_all_reduce
from actmem.parallel.conjugates import g
from actmem.parallel.groups import TensorParallel, tensor_parallel


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share a sequence.  ranks: their group, seen from one of them; all may hold different tokens.

    kind: one of CONTEXT_KINDS.  "gather" keeps this rank's K and V and gathers them again in backward, as
    sequence parallelism does with a product's input; "gather-plain" keeps the gathered K and V.
    """

    ranks: TensorParallel = TensorParallel()
    kind: str = "gather"

    def __post_init__(self) -> None:
        check_choice("context_kind", self.kind, CONTEXT_KINDS)

    @property
    def size(self) -> int:
        """How many ranks (c)."""
        return self.ranks.size

    @property
    def is_ulysses(self) -> bool:
        """Whether heads are exchanged for tokens.  A single rank exchanges nothing."""
        return self.kind == "ulysses" and self.size > 1

    @property
    def chunks(self) -> list[tuple[int, ...]]:
        """The chunks of the sequence that each rank holds, in its order."""
        c = self.size
        return [(rank,) if self.is_ulysses else (rank, 2 * c - 1 - rank) for rank in range(c)]

    @property
    def own_chunks(self) -> tuple[int, ...]:
        """Those of this rank."""
        return self.chunks[self.ranks.rank]

    def own_tokens(self, x: Tensor) -> Tensor:
        """This rank's tokens ``[s/c, …]`` of a whole sequence ``[s, …]``."""
        parts = x.chunk(sum(map(len, self.chunks)))
        return torch.cat([parts[chunk] for chunk in self.own_chunks])

    def in_order(self, gathered: Tensor) -> Tensor:
        """Tokens ``[s, …]`` as an all-gather leaves them, rank by rank, in the order of the sequence."""
        held = [chunk for chunks in self.chunks for chunk in chunks]
        parts = gathered.chunk(len(held))
        return torch.cat([parts[held.index(chunk)] for chunk in range(len(held))])

    def by_rank(self, x: Tensor) -> Tensor:
        """The other way: tokens in the order of the sequence as a reduce-scatter reads them."""
        parts = x.chunk(sum(map(len, self.chunks)))
        return torch.cat([parts[chunk] for chunks in self.chunks for chunk in chunks])

    def gathered(self, x: Tensor) -> Tensor:
        """``[s/c, …]`` of each rank to ``[s, …]`` in order.  Not differentiable; ``scattered`` is its conjugate."""
        return self.in_order(all_gather(x, self.ranks))

    def scattered(self, x: Tensor) -> Tensor:
        """The sum over the ranks of ``[s, …]``, and of it this rank's ``[s/c, …]``.  Not differentiable."""
        return reduce_scatter(self.by_rank(x), self.ranks)

    def enter_query(self, x: Tensor) -> Tensor:
        """``[s/c, b, heads, d]`` to the queries that this rank attends with.  Keeps nothing."""
        return to_heads(x, self.ranks) if self.is_ulysses else x

    def enter_key(self, x: Tensor) -> Tensor:
        """The same for keys and values.  Keeps nothing; what the plain kind gathers here, attention keeps."""
        if self.kind == "gather-plain" and self.size > 1:
            return self.in_order(g(x, self.ranks))
        return self.enter_query(x)


def layer_groups(
    context_parallel_size: int,
    kind: str = "gather",
    *,
    sequence_parallel: bool = False,
    members: list[int] | None = None,
) -> tuple[TensorParallel, ContextParallel]:
    """This rank's tensor-parallel and context-parallel groups.  Every rank of the job must call it.

    members: the ranks that share the layer, c·t of them; all by default.  t neighbours share its weights, and
    every t-th rank a sequence.  A rank that is no member gets groups of one.
    """
    ranks = sorted(members or range(dist.get_world_size()))
    t = len(ranks) // context_parallel_size
    rows = [ranks[first : first + t] for first in range(0, len(ranks), t)]
    groups = [dist.new_subgroups_by_enumeration(each)[0] for each in (rows, [list(row) for row in zip(*rows)])]
    if dist.get_rank() not in ranks:
        return TensorParallel(), ContextParallel(kind=kind)
    tensor, context = groups
    return tensor_parallel(tensor, sequence_parallel=sequence_parallel), ContextParallel(tensor_parallel(context), kind)


@torch.no_grad()
def reduce_context_gradients(module: nn.Module, context: ContextParallel) -> None:
    """Once an iteration, after backward: each rank found every weight's gradient from its own tokens; add them up."""
    for parameter in module.parameters():
        if (grad := gradient_of(parameter)) is not None:
            grad.copy_(start_all_reduce(grad, context.ranks).wait())


def to_heads(x: Tensor, ranks: TensorParallel) -> Tensor:
    """``[s/c, b, heads, d]`` to ``[s, b, heads/c, d]``: own tokens of all heads to all tokens of own heads.  Keeps nothing."""
    return _ToHeads.apply(x, ranks)


def to_tokens(x: Tensor, ranks: TensorParallel) -> Tensor:
    """``[s, b, heads/c, d]`` to ``[s/c, b, heads, d]``: the way back.  Keeps nothing."""
    return _ToTokens.apply(x, ranks)


class _ToHeads(Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        # To rank i the i-th part of the heads; from it the i-th part of the sequence.
        return _exchange(x.unflatten(2, (ranks.size, -1)).movedim(2, 0), ranks).flatten(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return to_tokens(grad, ctx.ranks), None


class _ToTokens(Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        return _exchange(x.unflatten(0, (ranks.size, -1)), ranks).movedim(0, 2).flatten(2, 3)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return to_heads(grad, ctx.ranks), None


def _exchange(parts: Tensor, ranks: TensorParallel) -> Tensor:
    """``[c, …]``: part i to rank i, and in its place the part that rank i has for this one."""
    parts = parts.contiguous()
    result = torch.empty_like(parts)
    dist.all_to_all_single(result, parts, group=ranks.group)
    return result


#: The autograd Functions of the exchange, for tools that name them.
FUNCTIONS = {"to_heads": _ToHeads, "to_tokens": _ToTokens}
