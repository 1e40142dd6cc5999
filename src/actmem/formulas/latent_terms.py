"""Activation bytes and FLOPs of multi-head latent attention: what goes in, the latents, and the heads made from them.

Letters of 2405.04434: the latents have q and c elements; a head's query and key have n elements without a
position and r with one, its value v.
"""

from __future__ import annotations

from actmem.checks import ConfigError, checked
from actmem.config import Parallel
from actmem.llama_shape import LatentHeads, LlamaShape, check_llama_ranks
from actmem.rows import Row

#: Bytes of a norm's statistic, which is float32 for every e up to 4.
STATISTIC = 4


@checked
def latent_head_rows(shape: LlamaShape, parallel: Parallel = Parallel(), element_size: int = 2) -> list[Row]:
    """From the two latents to Q, K and V, in the order of the forward pass.

    In 16 bits and without parallelism: 4sbq + 4sbc + 2sbr + 8sb for the latents, before and after their norms,
    and 4sba(n + r) + 2sbav for the heads.  The heads are divided by t.  A latent is made from whole tokens, so
    only sequence parallelism divides it.  The key's part with positions lies in the KV latent's tensor.
    Raises ConfigError on a layer without latents, or if t ranks can't share it.
    """
    sizes = _latent(shape)
    check_llama_ranks(shape, parallel)
    t, e = parallel.tensor_parallel_size, element_size
    whole = parallel.sequence_parts
    own = shape.seq_length * shape.micro_batch_size // whole
    heads = e * shape.seq_length * shape.micro_batch_size * shape.num_attention_heads // t
    rows = []
    for name, rank, more in (("Q", sizes.query_rank, 0), ("KV", sizes.key_value_rank, sizes.rope_head_size)):
        rows += [
            Row(f"{name} latent", e * own * (rank + more), whole, "RMSNorm of the latent"),
            Row(f"{name} latent norm statistics", max(e, STATISTIC) * own, whole, "RMSNorm: 1/rms of each latent"),
            Row(f"{name} up-projection input", e * own * rank, whole, "up-projection to the heads"),
        ]
    return [
        *rows[:3],
        Row("Q", heads * shape.d, t, "attention, partly rotated"),
        *rows[3:],
        Row("K", heads * shape.d, t, "attention, partly rotated"),
        Row("V", heads * sizes.value_head_size, t, "attention"),
    ]


@checked
def latent_products(shape: LlamaShape) -> dict[str, int]:
    """FLOPs of the products that make Q, K and V, forward, over all ranks; a latent's counts once, as a router's does."""
    sizes = _latent(shape)
    tokens, h, a = shape.seq_length * shape.micro_batch_size, shape.hidden_size, shape.num_attention_heads
    return {
        "Q down-projection": 2 * tokens * h * sizes.query_rank,
        "Q up-projection": 2 * tokens * sizes.query_rank * a * shape.d,
        "KV down-projection": 2 * tokens * h * (sizes.key_value_rank + sizes.rope_head_size),
        "KV up-projection": 2 * tokens * sizes.key_value_rank * a * (sizes.nope_head_size + sizes.value_head_size),
    }


def _latent(shape: LlamaShape) -> LatentHeads:
    if shape.latent is None:
        raise ConfigError("shape", "this layer has no latents")
    return shape.latent
