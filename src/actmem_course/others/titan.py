"""What torchtitan's Llama keeps on one rank when the loss's backward begins, line by line.

Read from pytorch/torchtitan of December 2024 (train.py, parallelisms/parallelize_llama.py): FSDP2 with float32 shards,
16-bit compute, gradients None until backward makes them, checkpoints of whole blocks or of every second
product.  It logs what the allocator *reserved*, which this can't count: the difference stays unexplained.
"""

from __future__ import annotations

from actmem.config import ConfigError
from actmem.llama_shape import LlamaShape
from actmem.plan.layout import Layout
from actmem.plan.rank_bill import Bill
from actmem.rows import Row


def titan_layer_rows(decoder: LlamaShape, tokens: int, tensor_parallel_size: int, recompute: str) -> list[Row]:
    """What a checkpointed block keeps of ``tokens`` tokens: its input and, if selective, results of every second product."""
    d, t = decoder, tensor_parallel_size
    hidden, wide = 2 * tokens * d.hidden_size // t, 2 * tokens * d.ffn_hidden_size // t
    rows = [Row("block input", hidden, t, "checkpoint")]
    if recompute == "full":
        return rows
    if recompute != "selective" or t > 1:
        raise ConfigError("recompute", "selective is read for one tensor-parallel rank, full for any")
    source = "saved: wq, wv, w1, w2; made again: wk, wo, w3"
    return rows + [
        Row("query projection", 2 * tokens * d.query_size, 1, source),
        Row("value projection", 2 * tokens * d.key_value_size, 1, source),
        Row("attention output", 2 * tokens * d.query_size, 1, "flash attention is always saved"),
        Row("log-sum-exp", 4 * tokens * d.num_attention_heads, 1, "flash attention is always saved"),
        Row("gate projection", wide, 1, source),
        Row("down projection", hidden, 1, source),
    ]


def titan_bill(decoder: LlamaShape, layout: Layout, seq_length: int, recompute: str) -> Bill:
    """One rank's bill at the loss's backward.  Raises ConfigError with a pipeline: which rank is fullest isn't known."""
    if layout.pipeline_parallel_size > 1:
        raise ConfigError("pipeline_parallel_size", "the table doesn't say which rank held most, nor how it was cut")
    d, t = decoder, layout.tensor_parallel_size
    ranks = layout.data_parallel_size * layout.context_parallel_size
    tokens = seq_length // layout.context_parallel_size * layout.micro_batch_size
    layer = (d.attention_weights + d.mlp_weights) // t + 2 * d.hidden_size
    ends = 2 * d.vocab_size * d.hidden_size // t + d.hidden_size
    parameters = d.num_layers * layer + ends
    logits = tokens * d.vocab_size // t
    return Bill(
        "backward of the loss",
        {
            "weights": [Row("parameters", 4 * -(-parameters // ranks), ranks, "float32 shards")],
            "optimizer states": [
                Row(name, 4 * -(-parameters // ranks), ranks, "float32")
                for name in ("Adam first moment", "Adam second moment")
            ],
            "communication buffers": [
                Row("gathered weights of the ends", 2 * ends, t, "the root's stay gathered until backward"),
                Row("gathered weights of the last block", 2 * layer, t, "not resharded after forward"),
            ],
            "activations": [
                Row(row.term, d.num_layers * row.bytes, row.split_by, row.source)
                for row in titan_layer_rows(d, tokens, t, recompute)
            ],
            "logits and loss": [
                Row("log-softmax, float32", 4 * logits, t, "saved"),
                Row("its gradient, float32", 4 * logits, t, "backward of the loss"),
                Row("gradient of the logits, float32", 4 * logits, t, "backward of log-softmax"),
            ],
        },
    )
