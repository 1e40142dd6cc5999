"""python my/labs/lab9_the_ends.py

Lab 9: the loss, where tensors are v wide.

Read notebooks/10_the_loss.ipynb first; each exercise names its section.

Write the functions below in your own copy of this file, which make labs puts into my/labs.  The
command above judges them.  For a hint, add --hint 9.1.

Letters as in 2205.05198: s tokens, b sequences, h hidden size, v size of the vocabulary.  Weights
are as torch stores them, [v, h].  Save tensors for backward with ctx.save_for_backward; what is held
in any other way escapes the count.  No function may write to a tensor that it was given.
"""

if __name__ == "__main__":
    from actmem_course.judge import main

    raise SystemExit(main(globals()))

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


# given: the dtype to compute in
def wide(x: Tensor) -> Tensor:
    """Return x in float32, or x itself if its dtype is float64."""
    return x if x.dtype is torch.float64 else x.float()


# 9.1: read “What the loss saves”
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each token, log Σ exp(logits) − the target's logit.

    Compute in the dtype of wide(logits), float32, in backward too: the target's gradient is p − 1, which 16 bits round
    to 0 if the probability p is near 1.

    Args:
        logits: [s, b, v].
        targets: [s, b], ids from 0 to v − 1.

    Returns:
        The losses, [s, b], in the dtype of wide(logits).  The gradient of logits has the dtype of logits.

    Saves: targets, one tensor of v elements per token in the dtype of logits, and at most 32 bytes per token more.
        That is 2sbv in 16 bits, where F.cross_entropy(logits.float(), …) saves 4sbv.
    Source: 2205.05198 section 4.3 counts those 4sbv.
    """
    raise NotImplementedError


# 9.2: read “A chunk at a time”
def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """Return cross_entropy(F.linear(x, weight), targets), but compute the logits of ``chunk`` tokens at a time.

    No tensor may be larger than the largest of a chunk's logits, x and weight.  At any time at most 4 tensors as large
    as a chunk's logits may be alive, 3 as large as x, and 3 as large as weight.  Forward and backward together run 4
    matmuls of s·b·v·h multiplications, where cross_entropy(F.linear(x, weight), targets) runs 3.  Add up the gradient
    of weight over the chunks in the dtype of wide(weight), float32.

    Args:
        x: [s, b, h].
        weight: [v, h].
        targets: [s, b], ids from 0 to v − 1.
        chunk: how many of the s·b tokens one chunk has; it need not divide s·b.

    Returns:
        The losses, [s, b], in the dtype of wide(x).  The gradients have the dtypes of x and weight.

    Saves: x, and at most 32 bytes per token more.
    Source: 2205.05198 section 4.3 counts 4sbv bytes of logits, which are not saved here.
    """
    raise NotImplementedError
