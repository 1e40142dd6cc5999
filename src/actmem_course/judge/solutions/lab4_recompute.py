"""python my/labs/lab4_recompute.py

Lab 4: recomputation (2205.05198 section 5).

Write the functions below in your own copy of this file, which make labs puts into my/labs.  The
command above judges them.  For a hint, add --hint 4.1.

Save tensors for backward with ctx.save_for_backward; what is held in any other way escapes the
count.  No function may write to a tensor that it was given.
"""

import torch
from torch import Tensor
from torch.autograd import Function

from actmem_course.reference_layer import Dropouts, LayerWeights, core_attention, layer


# 4.1 and 4.2
def checkpoint(function, *inputs: Tensor) -> Tensor:
    """Return function(*inputs), and save only the inputs for backward; backward runs function again.

    Exercise 4.2 adds dropout: function may draw random numbers from torch's default generators.  The gradients must
    still be the same as without checkpoint, and so must the generators' states after forward and after backward.  You
    may save the generators' states, too.

    Args:
        function: takes the inputs and returns one tensor; it may use parameters that are not among inputs, and these
            parameters get their gradients too.
        inputs: tensors of any shape; at least one requires a gradient, not all need to.

    Returns:
        The tensor that function returns.

    Saves: the inputs.
    Source: 2205.05198 section 5.
    """
    return _Checkpoint.apply(function, *inputs)


class _Checkpoint(Function):
    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function = function
        ctx.save_for_backward(*inputs, *_states(inputs[0]))
        with torch.no_grad():
            return function(*inputs)

    @staticmethod
    def backward(ctx, grad):
        count = len(ctx.needs_input_grad) - 1
        inputs, states = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        inputs = [x.detach().requires_grad_(needs) for x, needs in zip(inputs, ctx.needs_input_grad[1:])]
        before = _states(inputs[0])
        _restore(states)
        with torch.enable_grad():
            y = ctx.function(*inputs)
        _restore(before)
        torch.autograd.backward(y, grad)
        return None, *(x.grad for x in inputs)


def _states(x):
    """Return the states of the default generators that a function of x may draw from."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state(x.device)] if x.is_cuda else [])


def _restore(states):
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


# 4.3
def selective_layer(x: Tensor, w: LayerWeights, dropouts: Dropouts) -> Tensor:
    """Return layer(x, w, dropouts), where backward recomputes the core attention and nothing else.

    layer takes a fourth argument, core: a function that layer calls instead of core_attention, with the arguments of
    core_attention (q, k, v, dropout).

    Args:
        x: [s, b, h].
        w: the layer's twelve parameters, unsharded.
        dropouts: dropouts.core and dropouts.block; both draw from torch's default generators.

    Returns:
        The layer's output, [s, b, h].

    Saves: what layer saves, without the three tensors of the core attention: 34sbh bytes in 16 bits.
    Source: 2205.05198 section 5.
    """

    def core(q, k, v, dropout):
        return checkpoint(lambda q, k, v: core_attention(q, k, v, dropout), q, k, v)

    return layer(x, w, dropouts, core)


# 4.4
def full_layer(x: Tensor, w: LayerWeights, dropouts: Dropouts) -> Tensor:
    """Return layer(x, w, dropouts), and save only x for backward, which recomputes the whole layer.

    Args:
        x: [s, b, h].
        w: the layer's twelve parameters, unsharded.
        dropouts: dropouts.core and dropouts.block; both draw from torch's default generators.

    Returns:
        The layer's output, [s, b, h].

    Saves: x.
    Source: 2205.05198 section 5.
    """
    return checkpoint(lambda y: layer(y, w, dropouts), x)
