"""python my/labs/lab4_recompute.py

Lab 4: recomputation (2205.05198 section 5).

Read notebooks/05_recomputation.ipynb first; each exercise names its section.

Write the functions below in your own copy of this file, which make labs puts into my/labs.  The
command above judges them.  For a hint, add --hint 4.1.

Save tensors for backward with ctx.save_for_backward; what is held in any other way escapes the
count.  No function may write to a tensor that it was given.
"""

if __name__ == "__main__":
    from actmem_course.judge import main

    raise SystemExit(main(globals()))

import torch
from torch import Tensor
from torch.autograd import Function

from actmem_course.reference_layer import Dropouts, LayerWeights, core_attention, layer


# 4.1 and 4.2: read “How a checkpoint function works, in four steps”
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
    raise NotImplementedError


# 4.3: read “How a checkpoint function works, in four steps”
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
    raise NotImplementedError


# 4.4: read “How a checkpoint function works, in four steps”
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
    raise NotImplementedError
