"""What a Llama's layer keeps if its linears compute in FP8: by rule, not run.

The rule is what Megatron-LM does with TransformerEngine, from 2.6 on, on Hopper, by their source of August 2026
(d98e8a64 and d0067d0d): one scale for each tensor, made from its present values (``--fp8-recipe tensorwise``), and
weights that stay in 16 bits beside their copies (without ``--fp8-param-gather``). A matmul on Hopper reads FP8 in one
orientation only, so each tensor is copied by rows and by columns.

- A linear saves one copy of its input, a byte for each element: the one by columns, or under sequence parallelism the
  shard by rows that it gathers again (pytorch/module/linear.py, layernorm_linear.py).
- The attention projection saves its input in 16 bits, the tensor that attention saves too (Megatron-LM's
  core/transformer/attention.py: ``set_save_original_input``). With delayed scaling, which is Megatron-LM's default, it
  would save a copy in FP8 in addition.
- A linear caches both copies of its weight for good (``is_first_microbatch``, base.py: ``quantize_weight``).
- Norms, attention and SwiGLU save 16 bits. The embedding, the output layer and the loss compute in 16 bits or more.

Scales aren't counted: 4 bytes for each copy.
"""

from collections.abc import Iterable
from dataclasses import replace

from actmem.rows import Row
from actmem_more.llama_shape import LlamaShape

#: Inputs of linears that are saved in FP8.
_NARROW = ("QKV projection input", "gate and up input", "down input")


def fp8_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of a layer whose linears compute in FP8, made from its rows in 16 bits.

    The inputs of the QKV projection and of the MLP's matmuls have half the bytes, and a name that ends with ", FP8: by
    rule, not run". All other rows stay.

    Args:
        rows: the rows of the same layer in 16 bits, without experts.
    """
    narrow = {term: f"{term}, FP8: by rule, not run" for term in _NARROW}
    return [replace(row, term=narrow[row.term], bytes=row.bytes // 2) if row.term in narrow else row for row in rows]


def fp8_copies(shape: LlamaShape, tensor_parallel_size: int, tokens: int) -> tuple[int, int]:
    """Count the bytes that one rank needs in FP8 beyond what it needs in 16 bits, apart from saved activations.

    Args:
        shape: the sizes of a model without experts.
        tensor_parallel_size: t.
        tokens: tokens of one microbatch on this rank, before sequence parallelism shards them.

    Returns: two numbers of bytes. The first is for one layer's weights: two FP8 copies of each. The second is for the
        moment of a layer's backward that takes the most memory. At that moment there are two FP8 copies of the gradient
        of the output of gate and up: 4·tokens·f/t bytes with an MLP of width f. And the down projection's input, which
        has been freed by then, freed tokens·f/t bytes less than in 16 bits.
    """
    t, f = tensor_parallel_size, shape.ffn_hidden_size
    heads = shape.query_size // t + max(shape.num_key_value_heads // t, 1) * shape.d
    weights = 2 * shape.hidden_size * heads + shape.mlp_weights // t
    return 2 * weights, (2 * 2 + 1) * tokens * f // t
