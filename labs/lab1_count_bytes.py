"""python my/labs/lab1_count_bytes.py

Lab 1: count the bytes that one transformer layer saves for backward (2205.05198 section 4.1).

Read notebooks/02_counting_bytes.ipynb first; each exercise names its section.

Write the functions below in your own copy of this file, which make labs puts into my/labs.  The
command above judges them: what you predict is compared with what a real layer saves.  For a hint,
add --hint 1.1.

All activations have 16 bits, dropout masks 1 byte per element.  Results are whole numbers.
"""

if __name__ == "__main__":
    from actmem_course.judge import main

    raise SystemExit(main(globals()))

import torch.nn.functional as F
from torch import Tensor


# 1.1: read “One rule”
def layer_bytes(seq_length: int, micro_batch_size: int, hidden_size: int, num_attention_heads: int) -> dict[str, int]:
    """Return the bytes of each of the 15 tensors that a layer saves for backward, on one device.

    Args:
        seq_length: s, in tokens.
        micro_batch_size: b, in sequences.
        hidden_size: h, in elements.
        num_attention_heads: a.

    Returns:
        A dict with the bytes of each tensor, under these names: "layer-norm 1 input", "QKV projection input", "Q", "K",
            "softmax output", "softmax dropout mask", "softmax dropout output", "V", "attention projection input",
            "attention dropout mask", "layer-norm 2 input", "h→4h input", "GeLU input", "4h→h input",
            "MLP dropout mask".

    Source: 2205.05198 section 4.1.
    """
    raise NotImplementedError


# 1.2: read “Table 2: six ways to train a layer” in notebooks/05_recomputation.ipynb
def rank_bytes(
    seq_length: int,
    micro_batch_size: int,
    hidden_size: int,
    num_attention_heads: int,
    tensor_parallel_size: int,
    sequence_parallel: bool,
    recompute: str,
) -> int:
    """Return the bytes that the layer of 1.1 saves for backward on one of t ranks, all tensors together.

    Args:
        seq_length: s, in tokens.
        micro_batch_size: b, in sequences.
        hidden_size: h, in elements.
        num_attention_heads: a, of all ranks together.
        tensor_parallel_size: t.
        sequence_parallel: whether layer norms and dropouts are sharded among the t ranks as well.
        recompute: "none", "selective" or "full".  Under full recomputation a layer saves its input, 2sbh; sequence
            parallelism shards that input, too.

    Returns:
        The sum of the bytes of all tensors.

    Source: 2205.05198 table 2.
    """
    raise NotImplementedError


# 1.3: read “On your own module”
# given: the MLP of many models that came after the paper
def gated_mlp(x: Tensor, gate_weight: Tensor, up_weight: Tensor, down_weight: Tensor) -> Tensor:
    """Compute the MLP of Llama: down(silu(gate(x)) · up(x)).

    Args:
        x: [s, b, h].
        gate_weight: [f, h].
        up_weight: [f, h].
        down_weight: [h, f].

    Returns:
        [s, b, h].
    """
    return F.linear(F.silu(F.linear(x, gate_weight)) * F.linear(x, up_weight), down_weight)


def gated_mlp_bytes(seq_length: int, micro_batch_size: int, hidden_size: int, feed_forward_size: int) -> int:
    """Return the bytes that gated_mlp saves for backward, without its weights.

    Args:
        seq_length: s, in tokens.
        micro_batch_size: b, in sequences.
        hidden_size: h, in elements.
        feed_forward_size: f, the output features of gate and up.

    Returns:
        The sum of the bytes of all tensors; the judge compares it with what gated_mlp really saves.

    Source: 2205.05198 section 4.1 counts the MLP of 2022 in the same way.
    """
    raise NotImplementedError


# 1.4: read “Where attention takes over”
def crossover_seq_length(hidden_size: int, num_attention_heads: int) -> int:
    """Return the smallest seq_length at which the core attention saves more than the rest of the layer of 1.1.

    The core attention saves three tensors: softmax output, softmax dropout mask, softmax dropout output.  Count for one
    device and no recomputation.

    Args:
        hidden_size: h, in elements.
        num_attention_heads: a.

    Returns:
        The seq_length, in tokens.

    Source: 2205.05198 section 5.
    """
    raise NotImplementedError
