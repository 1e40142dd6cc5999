"""python labs/lab4_recompute.py

Lab 4: recomputation (2205.05198 section 5).

Write the functions below; run the command above to have them judged.  For a hint:
python labs/lab4_recompute.py --hint 4.1

Keep tensors for backward with ctx.save_for_backward, or with keep, which does that outside of a
Function: kept = keep(x, y), later kept.tensors().  What is held in another way is held out of
sight.  No function may write to a tensor that it was given.
"""

import sys

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from actmem.keep import keep
from actmem.lab.judge import main
from actmem.lab.pieces import Dropouts, LayerWeights, core_attention, layer


# 4.1 and 4.2
def checkpoint(function, *inputs: Tensor) -> Tensor:
    """function(*inputs), with nothing kept for backward but the inputs; backward runs function again.

    function returns one tensor; it may use parameters that are not among inputs, and these get
    their gradients too.  At least one input requires a gradient; not all need to.
    4.2: function may draw random numbers from torch's default generators (dropout).  Gradients are
    the same as without checkpoint, and the generators stand where they stood without it, after
    forward and after backward; their states may be kept as well.  2205.05198 section 5.
    """
    raise NotImplementedError


# 4.3
def selective_layer(x: Tensor, w: LayerWeights, dropouts: Dropouts) -> Tensor:
    """What layer(x, w, dropouts) computes, with the core attention recomputed in backward, and nothing else.

    x: [s, b, h].  layer takes a fourth argument, core: what to call in place of core_attention,
    with the same arguments (q, k, v, dropout).  2205.05198 section 5.
    """
    raise NotImplementedError


# 4.4
def full_layer(x: Tensor, w: LayerWeights, dropouts: Dropouts) -> Tensor:
    """What layer(x, w, dropouts) computes, with x alone kept for backward.

    2205.05198 section 5.
    """
    raise NotImplementedError


# 4.5, advanced
def checkpoint_stopping_early(function, *inputs: Tensor) -> Tensor:
    """Like checkpoint, but the second run ends with the last tensor that backward reads.

    What function computes after that, often its last matrix product, makes only the result, which
    is there already.  2205.05198 section 5 counts the whole region instead.
    """
    raise NotImplementedError


if __name__ == "__main__":
    sys.exit(main(globals()))
