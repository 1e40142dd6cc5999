"""Context parallelism: each of c ranks has s/c tokens of a sequence throughout the model.

Everything but attention works on one token at a time, so a rank needs only its own s/c tokens.  Attention
needs the others' keys and values.  Two ways to get them:

    gather     all-gather K and V along the sequence, as Llama 3 does (2407.21783 section 3.3.2)
    ulysses    all-to-all from tokens to heads and back: each rank attends over all tokens with 1/c of
               its heads (DeepSpeed Ulysses, 2309.14509)

Gather splits the sequence into 2c chunks and gives rank i chunks i and 2c - 1 - i.  Under a causal mask an early chunk
attends to few keys and a late chunk to many; with such a pair every rank has the same work.  Ulysses needs no such
order: in attention every rank has all tokens.

**Attention of one rank's tokens.**  torch's flash kernel can't compute it in one call.  Its causal mask starts at the
first key, so it is right only for the first chunk of a sequence; with an explicit mask the kernel saves that mask,
which grows with s².  So each chunk of queries makes two calls: one over all earlier keys without a mask, and one over
its own keys with a causal mask.  The two log-sum-exps give the weights with which the two results add up.  In backward
each call gets the log-sum-exp over all keys, and so computes its part of the gradients (as ring attention does,
2310.01889).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from actmem.config import ConfigError, check_choice, check_divides, check_size
from actmem.keep import differentiates_once
from actmem.parallel.collectives import all_gather, reduce_scatter
from actmem.parallel.conjugates import g
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem_more.all_to_all import all_to_all
from actmem_more.llama_shape import CONTEXT_KINDS
from actmem_more.torch_private import flash_attention, flash_backward, flash_on_cpu, flash_on_cpu_backward


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that share a sequence, and the way in which they compute attention.

    Each rank computes every weight's gradient from its own tokens only. So sum the gradients over these ranks, as over
    data-parallel ranks.

    Args:
        ranks: the process group and this rank's number in it.
        kind: how attention gets all keys and values. "gather" saves this rank's K and V and gathers them again in
            backward, as sequence parallelism does with a matmul's input. "gather-plain" saves the gathered K and V.
            "ulysses" does attention over all tokens with 1/c of the heads.
    """

    ranks: TensorParallel = TensorParallel()
    kind: str = "gather"

    def __post_init__(self) -> None:
        check_choice("context_kind", self.kind, CONTEXT_KINDS)

    @property
    def size(self) -> int:
        """c, the number of ranks that share a sequence."""
        return self.ranks.size

    @property
    def is_ulysses(self) -> bool:
        """Whether attention runs over all tokens of 1/c of the heads; False if c = 1."""
        return self.kind == "ulysses" and self.size > 1

    @property
    def chunks(self) -> list[tuple[int, ...]]:
        """For each rank, the numbers of the sequence's chunks that it has, in its order: (0, 3), (1, 2) with 2 ranks.

        Under "ulysses" each rank has one chunk: (0,), (1,).
        """
        c = self.size
        return [(rank,) if self.is_ulysses else (rank, 2 * c - 1 - rank) for rank in range(c)]

    def own_tokens(self, x: Tensor) -> Tensor:
        """Return this rank's tokens ``[s/c, …]`` of a whole sequence ``[s, …]``.

        Raises: ConfigError if the sequence can't be split into the ranks' chunks.
        """
        if self.size == 1:
            return x
        number = sum(map(len, self.chunks))
        check_divides("sequence length", len(x), "the number of chunks", number)
        parts = x.chunk(number)
        return torch.cat([parts[chunk] for chunk in self.chunks[self.ranks.rank]])

    def in_order(self, gathered: Tensor) -> Tensor:
        """Reorder the tokens ``[s, …]`` of an all-gather, which come rank after rank, into the sequence's order."""
        held = [chunk for chunks in self.chunks for chunk in chunks]
        parts = gathered.chunk(len(held))
        return torch.cat([parts[held.index(chunk)] for chunk in range(len(held))])

    def _by_rank(self, x: Tensor) -> Tensor:
        """Reorder the tokens ``[s, …]`` of a sequence so that they come rank after rank (undoes ``in_order``)."""
        parts = x.chunk(sum(map(len, self.chunks)))
        return torch.cat([parts[chunk] for chunks in self.chunks for chunk in chunks])

    def gathered(self, x: Tensor) -> Tensor:
        """All-gather the ranks' tokens: ``[s/c, …]`` in, ``[s, …]`` in the sequence's order out.

        This method is not differentiable: in a backward pass call ``scattered`` with the gradient of the result.
        """
        return self.in_order(all_gather(x, self.ranks))

    def scattered(self, x: Tensor) -> Tensor:
        """Reduce-scatter over the ranks: ``[s, …]`` in, this rank's tokens ``[s/c, …]`` of the sum out.

        This method is not differentiable: in a backward pass call ``gathered`` with the gradient of the result.
        """
        return reduce_scatter(self._by_rank(x), self.ranks)

    def enter_query(self, x: Tensor) -> Tensor:
        """Return the queries that this rank gives to its attention kernel.

        Args:
            x: queries ``[s/c, b, heads, d]`` of this rank's tokens.

        Returns: under "ulysses" ``[s, b, heads/c, d]``, all tokens of this rank's heads, by an all-to-all; else x.
        Saves: nothing.
        """
        return to_heads(x, self.ranks) if self.is_ulysses else x

    def enter_key(self, x: Tensor) -> Tensor:
        """Return the keys or values that this rank gives to ``attend_part``, or under "ulysses" to the kernel.

        Args:
            x: keys or values ``[s/c, b, heads, d]`` of this rank's tokens.

        Returns: under "gather-plain" ``[s, b, heads, d]``, all tokens, by an all-gather; under "ulysses"
            ``[s, b, heads/c, d]``; under "gather" x, which ``attend_part`` gathers.
        Saves: nothing.
        """
        if self.kind == "gather-plain" and self.size > 1:
            return self.in_order(g(x, self.ranks))
        return self.enter_query(x)


def layer_groups(
    context_parallel_size: int, kind: str = "gather", *, sequence_parallel: bool = False, replicas: int = 1
) -> tuple[TensorParallel, ContextParallel]:
    """Make this rank's tensor-parallel and context-parallel groups. Every rank of the job must call this function.

    A copy of the model has c·t ranks. t neighbouring ranks shard its weights (the tensor-parallel group); ranks r,
    r + t, r + 2t, … share a sequence (the context-parallel group).

    Args:
        context_parallel_size: c.
        kind: how a context-parallel group computes attention: "gather", "gather-plain" or "ulysses".
        sequence_parallel: whether the tensor-parallel group splits layer norms and residuals along the sequence.
        replicas: number of data-parallel copies of the model; t follows from the number of ranks.

    Returns: the tensor-parallel and the context-parallel group.
    Raises: ConfigError if context_parallel_size · replicas doesn't divide the number of ranks.
    """
    check_choice("kind", kind, CONTEXT_KINDS)
    check_size("context_parallel_size", context_parallel_size)
    world = dist.get_world_size()
    name = "context_parallel_size" if replicas == 1 else "context_parallel_size · replicas"
    t = check_divides("ranks", world, name, context_parallel_size * replicas)
    rows = [list(range(first, first + t)) for first in range(0, world, t)]
    c = context_parallel_size
    columns = [list(column) for first in range(0, len(rows), c) for column in zip(*rows[first : first + c])]
    tensor, context = (dist.new_subgroups_by_enumeration(each)[0] for each in (rows, columns))
    return tensor_parallel(tensor, sequence_parallel=sequence_parallel), ContextParallel(tensor_parallel(context), kind)


def to_heads(x: Tensor, ranks: TensorParallel) -> Tensor:
    """Run the all-to-all from this rank's tokens of all heads to all tokens of 1/c of the heads.

    Args:
        x: ``[s/c, b, heads, d]``.
        ranks: the c ranks that share the sequence.

    Returns: ``[s, b, heads/c, d]``.
    Saves: nothing.
    """
    return _ToHeads.apply(x, ranks)


def to_tokens(x: Tensor, ranks: TensorParallel) -> Tensor:
    """Run the all-to-all that undoes ``to_heads``: all tokens of 1/c of the heads to own tokens of all heads.

    Args:
        x: ``[s, b, heads/c, d]``.
        ranks: the c ranks that share the sequence.

    Returns: ``[s/c, b, heads, d]``.
    Saves: nothing.
    """
    return _ToTokens.apply(x, ranks)


class _ToHeads(Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        # Rank i gets the i-th part of the heads, and sends the i-th part of the sequence.
        return all_to_all(x.unflatten(2, (ranks.size, -1)).movedim(2, 0), ranks).flatten(0, 1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return to_tokens(grad, ctx.ranks), None


class _ToTokens(Function):
    @staticmethod
    def forward(ctx, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        return all_to_all(x.unflatten(0, (ranks.size, -1)), ranks).movedim(0, 2).flatten(2, 3)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return to_heads(grad, ctx.ranks), None


def attend_part(q: Tensor, k: Tensor, v: Tensor, context: ContextParallel) -> Tensor:
    """Return the causal attention of this rank's queries over the whole sequence, under "gather" or "gather-plain".

    Args:
        q: ``[b, heads, s/c, d]``, of this rank's tokens.
        k: under "gather" ``[b, kv heads, s/c, d]``, of this rank's tokens; this function gathers k and v, and again in
            backward. Under "gather-plain" ``[b, kv heads, s, d]``, already gathered.
        v: a tensor of the shape of k.
        context: the ranks that share the sequence, and the kind.

    Returns: ``[s/c, b, heads·d]``.
    Saves: q, k and v as given, the result, and the log-sum-exp of each query over all its keys, 4 bytes.
    """
    return _PartAttention.apply(q, k, v, context).flatten(2)


class _PartAttention(Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, context: ContextParallel) -> Tensor:
        if q.is_cuda and q.element_size() != 2:
            raise ConfigError("dtype", "context parallelism runs a flash kernel, which takes only 16 bits on a GPU")
        ctx.context = context
        keys, values = _whole(k, context), _whole(v, context)
        b, heads, length, d = q.shape
        result = q.new_empty(length, b, heads, d)
        sums = torch.empty(b, heads, length, device=q.device, dtype=torch.promote_types(q.dtype, torch.float32))
        for own, calls in _calls(context, length):
            parts = [_flash(q[:, :, own], keys[:, :, seen], values[:, :, seen], is_causal) for seen, is_causal in calls]
            total = torch.stack([lse for _, lse in parts]).logsumexp(0)
            sums[:, :, own] = total
            # In place: float32 takes twice the room of a part's own result.
            merged, *others = (out * (lse - total).exp()[..., None] for out, lse in parts)
            for other in others:
                merged += other
            result[own] = merged.permute(2, 0, 1, 3).to(q.dtype)
        ctx.save_for_backward(q, k, v, result, sums)
        return result

    @staticmethod
    @differentiates_once
    def backward(ctx, grad: Tensor):
        context: ContextParallel = ctx.context
        q, k, v, result, sums = ctx.saved_tensors
        keys, values = _whole(k, context), _whole(v, context)
        grad, result = (x.view_as(result).permute(1, 2, 0, 3) for x in (grad.contiguous(), result))
        # With the layout of their inputs, tokens first, so that no collective needs a copy.
        grad_q, grad_keys, grad_values = (_zeros_like(x) for x in (q, keys, values))
        for own, calls in _calls(context, q.shape[2]):
            for seen, is_causal in calls:
                gradients = _flash_backward(
                    grad[:, :, own], q[:, :, own], keys[:, :, seen], values[:, :, seen],
                    result[:, :, own], sums[:, :, own].contiguous(), is_causal,
                )  # fmt: skip
                for total, rows, part in zip((grad_q, grad_keys, grad_values), (own, seen, seen), gradients):
                    total[:, :, rows] += part
        return grad_q, _own(grad_keys, context), _own(grad_values, context), None


def _calls(context: ContextParallel, length: int) -> list[tuple[slice, list[tuple[slice, bool]]]]:
    """List the kernel calls for each chunk of this rank's queries.

    Returns: for each chunk, the slice of this rank's tokens where it lies, and for each of its calls the slice of the
        keys and whether its mask is causal.
    """
    own_chunks = context.chunks[context.ranks.rank]
    size, calls = check_divides("sequence length", length, "the chunks of a rank", len(own_chunks)), []
    for place, chunk in enumerate(own_chunks):
        before, own = slice(0, chunk * size), slice(chunk * size, (chunk + 1) * size)
        calls.append((slice(place * size, (place + 1) * size), [(before, False)] * (chunk > 0) + [(own, True)]))
    return calls


def _whole(x: Tensor, context: ContextParallel) -> Tensor:
    """Return the keys or values of all tokens, ``[b, kv heads, s, d]``, in the order of the sequence."""
    if context.kind == "gather-plain":
        return x
    return context.gathered(x.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)


def _own(grad: Tensor, context: ContextParallel) -> Tensor:
    """Return the gradient for this rank's own keys or values, summed over the ranks whose queries read them."""
    if context.kind == "gather-plain":  # the conjugate of g does it
        return grad
    return context.scattered(grad.permute(2, 0, 1, 3)).permute(1, 2, 0, 3)


def _zeros_like(x: Tensor) -> Tensor:
    """Return zeros of shape ``[b, heads, s, d]``, as a view of a tensor with the tokens first."""
    b, heads, length, d = x.shape
    return x.new_zeros(length, b, heads, d).permute(1, 2, 0, 3)


def _flash(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Run the flash kernel; returns the result ``[b, heads, queries, d]`` and the log-sum-exp of each query."""
    if q.is_cuda:
        return flash_attention(q, k, v, 0.0, is_causal)[:2]
    return flash_on_cpu(q, k, v, 0.0, is_causal)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v through one call, from the result and log-sum-exp of all calls together."""
    if q.is_cuda:
        lengths, no_state = (q.shape[2], k.shape[2]), q.new_empty(2, dtype=torch.uint64)  # no dropout: not read
        return flash_backward(grad, q, k, v, out, lse, None, None, *lengths, 0.0, is_causal, no_state, no_state)
    return flash_on_cpu_backward(grad, q, k, v, out, lse, 0.0, is_causal)
