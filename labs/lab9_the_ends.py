"""python my/labs/lab9_the_ends.py

Lab 9: loss and embedding (with log-probabilities), where tensors are v wide.

Read notebooks/10_the_loss.ipynb first; each exercise names its section.

Write the functions below in your own copy of this file, which make labs puts into my/labs.  The
command above judges them on four ranks (--ranks 2 for two).  For a hint, add --hint 9.1.

Letters as in 2205.05198: s tokens, b sequences, h hidden size, v size of the vocabulary.  Weights
are as torch stores them, [v, h].  Save tensors for backward with ctx.save_for_backward; what is held
in any other way escapes the count.  No function may write to a tensor that it was given, except main_grad.
"""

if __name__ == "__main__":
    from actmem_course.judge import main

    raise SystemExit(main(globals()))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function


# given: the dtype to compute in
def wide(x: Tensor) -> Tensor:
    """x in float32; float64 stays as it is."""
    return x if x.dtype is torch.float64 else x.float()


# 9.1: read “What the loss saves”
def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of each token, log Σ exp(logits) − the target's logit.

    Compute in wide(logits), in backward too: where p is near 1, 16 bits lose p − 1.

    Args:
        logits: [s, b, v].
        targets: [s, b], ids from 0 to v − 1.

    Returns:
        [s, b], in the dtype of wide(logits).  The gradient of logits has their dtype.

    Saves: the ids, one tensor of v elements per token in the dtype of logits, and at most 32 bytes per token more:
        2sbv in 16 bits, where F.cross_entropy(logits.float(), …) saves 4sbv.
    Source: 2205.05198 section 4.3 counts those 4sbv.
    """
    raise NotImplementedError


# 9.2: read “A chunk at a time”
def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
    """cross_entropy(F.linear(x, weight), targets), with the logits of ``chunk`` tokens at a time.

    No tensor is larger than the logits of a chunk, or than x or weight.  At once there are at most 4 tensors as
    large as a chunk's logits, 3 as large as x, and 3 as large as weight.  4 matmuls of s·b·v·h run, where the plain
    form runs 3.  The gradient of weight is added up over the chunks in wide(weight)'s dtype, float32.

    Args:
        x: [s, b, h].
        weight: [v, h].
        targets: [s, b], ids from 0 to v − 1.
        chunk: tokens, not positions; it need not divide s·b.

    Returns:
        [s, b], in the dtype of wide(x).  The gradients have the dtypes of x and weight.

    Saves: x, and 32 bytes per token at most.
    Source: 2205.05198 section 4.3 counts the 4sbv bytes of logits that are gone.
    """
    raise NotImplementedError


# 9.3, advanced: read “The last stage”
def parallel_linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk: int, group) -> Tensor:
    """linear_cross_entropy, its chunks and sums too, with the vocabulary sharded among the ranks of group.

    group may be the ranks of a tensor-parallel layer, or those of a pipeline, whose last stage then has no more of
    the vocabulary than the others.

    Args:
        x: [s, b, h], the same on every rank.
        weight: [v/t, h], the rows r·v/t and up on rank r.
        targets: [s, b], ids from 0 to v − 1, the same on every rank.
        chunk: tokens.

    Returns:
        [s, b], the same on every rank.

    Collectives: of a few numbers per token in forward; in backward one all-reduce of x's gradient, whole or in
        chunks.
    Saves: x, and 32 bytes per token at most.
    Source: 2205.05198 section 4.3.
    """
    raise NotImplementedError


# 9.4: read “Reinforcement learning”
def log_probs_and_entropy(logits: Tensor, tokens: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """What reinforcement learning needs from 16-bit logits: log p of the given tokens, and the entropy.

    p is the softmax of logits, the entropy −Σ p log p.  Compute in wide(logits), in backward too.  Widen ``chunk``
    tokens at a time, and free them before the next.

    Args:
        logits: [s, b, v].
        tokens: [s, b], ids from 0 to v − 1.
        chunk: tokens.

    Returns:
        Log-probabilities, [s, b], in the dtype of wide(logits). Entropies, [s, b], in the same dtype; the caller
        may use only one of the two.  The gradient of logits has their dtype.

    Saves: logits, and 32 bytes per token at most, where torch's operators save 8sbv bytes.
    """
    raise NotImplementedError


# 9.5: read “The embedding”
def embedding(ids: Tensor, weight: Tensor, main_grad: Tensor) -> Tensor:
    """The rows of weight at ids; backward adds to main_grad and makes no gradient of weight's size.

    Backward adds wide(gradient) of each token to the row of its id; weight itself gets no .grad.

    Args:
        ids: [s, b], from 0 to v − 1, with repetitions.
        weight: [v, h].
        main_grad: [v, h] in the dtype of wide(weight), where earlier microbatches, and the output layer if it
            shares the weight, have left their gradients.

    Returns:
        [s, b, h].

    Saves: nothing but ids; torch's backward makes [v, h] each time.
    """
    raise NotImplementedError
