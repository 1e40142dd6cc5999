"""The paper's four operators: f, f_bar, g, g_bar (2205.05198 section 4.2, figures 4 to 6).

            forward          backward
    f       identity         all-reduce         enters a tensor-parallel block
    f_bar   all-reduce       identity           leaves it
    g       all-gather       reduce-scatter     enters it from a sequence-parallel region
    g_bar   reduce-scatter   all-gather         leaves it into one

f and f_bar are conjugate, and so are g and g_bar: the backward of one is the forward of the other.  So every
``backward`` below calls the conjugate operator.  No operator saves a tensor.  Layers don't call g before a linear:
``linear`` does both in one function, which saves the shard and gathers it again in backward.
"""

from torch import Tensor
from torch.autograd import Function

from actmem.parallel.collectives import all_gather, all_reduce, reduce_scatter
from actmem.parallel.groups import TensorParallel


def f(x: Tensor, tp: TensorParallel) -> Tensor:
    """Enter a tensor-parallel block: identity forward, all-reduce backward.

    Args:
        x: ``[s, b, h]``, the same on all t ranks.
        tp: the t ranks that share the block.

    Returns: x.
    Saves: nothing.
    """
    return _F.apply(x, tp)


def f_bar(x: Tensor, tp: TensorParallel) -> Tensor:
    """Leave a tensor-parallel block: all-reduce forward, identity backward.

    Args:
        x: ``[s, b, h]``, a partial sum on each of the t ranks.
        tp: the t ranks that share the block.

    Returns: ``[s, b, h]``, the sum, the same on all ranks.
    Saves: nothing.
    """
    return _FBar.apply(x, tp, False)


def g(x: Tensor, tp: TensorParallel) -> Tensor:
    """Gather the sequence: all-gather forward, reduce-scatter backward.

    Args:
        x: ``[s/t, b, h]``, this rank's tokens.
        tp: the t ranks that share the sequence.

    Returns: ``[s, b, h]``, all tokens.
    Saves: nothing.
    """
    return _G.apply(x, tp)


def g_bar(x: Tensor, tp: TensorParallel) -> Tensor:
    """Sum and scatter the sequence: reduce-scatter forward, all-gather backward.

    Args:
        x: ``[s, b, h]``, a partial sum on each of the t ranks.
        tp: the t ranks that share the sequence.

    Returns: ``[s/t, b, h]``, this rank's tokens of the sum.
    Saves: nothing.
    """
    return _GBar.apply(x, tp)


def f_or_g(x: Tensor, tp: TensorParallel) -> Tensor:
    """Enter a tensor-parallel block: g under sequence parallelism, else f.

    A column-parallel linear calls this only if ``tp.keep_gathered_input`` is set, and then saves the gathered input.
    Otherwise the linear gathers its input itself, saves its own shard, and gathers again in backward.

    Args:
        x: ``[s, b, h]`` replicated, or ``[s/t, b, h]`` under sequence parallelism.
        tp: the t ranks that share the block.

    Returns: ``[s, b, h]``.
    """
    return g(x, tp) if tp.sequence_parallel else f(x, tp)


def f_bar_or_g_bar(x: Tensor, tp: TensorParallel) -> Tensor:
    """Leave a tensor-parallel block: g_bar under sequence parallelism, else f_bar.

    f_bar here writes its result into x. So nothing else may read x, and the operation that made x may not have saved
    x for backward.

    Args:
        x: ``[s, b, h]``, a partial sum on each of the t ranks.
        tp: the t ranks that share the block.

    Returns: the sum, ``[s, b, h]``, or ``[s/t, b, h]`` under sequence parallelism.
    """
    if tp.size == 1:
        return x
    return g_bar(x, tp) if tp.sequence_parallel else _FBar.apply(x, tp, True)


class _F(Function):
    @staticmethod
    def forward(ctx, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # Every rank used all of x for its own slice of the matmul: x's gradient is the sum of the ranks' gradients.
        return f_bar(grad, ctx.tp), None


class _FBar(Function):
    @staticmethod
    def forward(ctx, x: Tensor, tp: TensorParallel, in_place: bool) -> Tensor:
        ctx.tp = tp
        if in_place:
            ctx.mark_dirty(x)
        return all_reduce(x, tp, in_place=in_place)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # After the sum every rank runs the same code, so each has the whole gradient.  Another sum would count it
        # t times.
        return f(grad, ctx.tp), None, None


class _G(Function):
    @staticmethod
    def forward(ctx, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return all_gather(x, tp)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # Two things at once: sum the ranks' gradients as f does, and keep the tokens that this rank holds.
        return g_bar(grad, ctx.tp), None


class _GBar(Function):
    @staticmethod
    def forward(ctx, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return reduce_scatter(x, tp)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # Each rank has the gradient of its own tokens.  Its partial sum went into all tokens, so it needs the gradient
        # of all of them.
        return g(grad, ctx.tp), None


#: The autograd Function behind each operator, for tools that time or name them.
FUNCTIONS = {"f": _F, "f_bar": _FBar, "g": _G, "g_bar": _GBar}
