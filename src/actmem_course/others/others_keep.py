"""What one layer of other implementations and frameworks keeps, as formulas: read from their operators.

A formula is a sum of products of sizes: s, b, h, a, k, f as in LlamaShape, d elements of a head, E experts,
κ experts a token; of a layer that ranks share, a second sum that the t tensor-parallel ranks divide.  Each is counted
by ``measure_peers --today`` except those that say "on paper".  On CPUs; transformers 5.23, torch 2.13, megatron-core 0.16.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actmem.config import ConfigError, check_divides, check_size
from actmem.llama_shape import LlamaShape


@dataclass(frozen=True)
class OtherLayer:
    """One implementation.  coefficients: of each product of sizes, in bytes; divided: of those that the t ranks share.

    why: who keeps more than needed, and the way out.  dtype: of its activations.  dropout: whether it is on.
    sequence_parallel: whether its ranks also cut the sequence.  constant_bytes: generator states and
    counters, whatever the sizes.  modules: what megatron-core's recompute_modules name.  budget: torch's
    activation memory budget.
    """

    name: str
    dtype: str
    coefficients: dict[str, int]
    why: str
    dropout: bool = False
    divided: dict[str, int] = field(default_factory=dict)
    sequence_parallel: bool = False
    constant_bytes: int = 0
    modules: tuple[str, ...] = ()
    budget: float = 1

    @property
    def formula(self) -> str:
        """Such as ``4sbh + (20sbh + 4sbkd)/t``."""
        whole, shared = (
            " + ".join(f"{count}{product}" for product, count in part.items())
            for part in (self.coefficients, self.divided)
        )
        constant = f"{self.constant_bytes:,}" if self.constant_bytes else ""
        return " + ".join(part for part in (whole, f"({shared})/t" if shared else "", constant) if part)


def bytes_of_other(layer: OtherLayer, shape: LlamaShape, tensor_parallel_size: int = 1) -> int:
    """Its bytes on one of ``tensor_parallel_size`` ranks.  Raises ConfigError where they can't share the layer."""
    t = check_size("tensor_parallel_size", tensor_parallel_size)
    if t > 1 and not layer.divided:
        raise ConfigError("tensor_parallel_size", f"nothing cuts this layer: must be 1, got {t}")
    for name in ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size"):
        check_divides(name, getattr(shape, name), "tensor_parallel_size", t)
    if layer.sequence_parallel:
        check_divides("seq_length", shape.seq_length, "tensor_parallel_size", t)
    return _sum(layer.coefficients, shape) + _sum(layer.divided, shape) // t + layer.constant_bytes


def _sum(coefficients: Mapping[str, int], shape: LlamaShape) -> int:
    s, b, h, a = shape.seq_length, shape.micro_batch_size, shape.hidden_size, shape.num_attention_heads
    k, f, d = shape.num_key_value_heads, shape.ffn_hidden_size, shape.d
    experts, taken = shape.num_experts or 0, shape.experts_per_token or 0
    products = {
        "sbh": s * b * h,
        "sbkd": s * b * k * d,
        "sbf": s * b * f,
        "as²b": a * s * s * b,
        "asb": a * s * b,
        "sb": s * b,
        "sd": s * d,
        "sbκh": s * b * taken * h,
        "sbκf": s * b * taken * f,
        "sbκ": s * b * taken,
        "sbE": s * b * experts,
        "E": experts,
    }
    return sum(count * products[product] for product, count in coefficients.items())


_NORM = (
    "each RMSNorm keeps its float32 input and x̂ (6sbh), where its input (2sbh) is enough; silu(gate) and its product with "
    "up lie beside gate and up: fuse both"
)
_FLOAT32 = "x̂ lies beside each norm's input, and silu(gate) beside gate and up: fuse both; nothing is upcast in 32 bits"
_SCORES = "eager attention keeps the softmax's weights and a copy of K and V for each query head: a flash kernel keeps neither"
_EXPERTS = (
    "keeps each expert's tokens, its output and all E probabilities: dispatch again in backward, and multiply by the "
    "routing weight before the down product"
)

OTHERS = (
    OtherLayer(
        "Hugging Face Llama, sdpa", "bfloat16", {"sbh": 20, "sbkd": 4, "sbf": 8, "asb": 4, "sb": 8, "sd": 4}, _NORM
    ),
    OtherLayer(
        "Hugging Face Llama, sdpa",
        "float32",
        {"sbh": 32, "sbkd": 8, "sbf": 16, "asb": 4, "sb": 8, "sd": 8},
        _FLOAT32,
    ),
    OtherLayer("Hugging Face Llama, eager", "bfloat16", {"sbh": 24, "sbf": 8, "as²b": 6, "sb": 8, "sd": 4}, _SCORES),
    OtherLayer("Hugging Face Llama, eager", "float32", {"sbh": 40, "sbf": 16, "as²b": 4, "sb": 8, "sd": 8}, _SCORES),
    OtherLayer(
        "Hugging Face GPT-2, eager",
        "bfloat16",
        {"sbh": 60, "as²b": 6, "sb": 8},
        "gelu_new's four operations keep 32sbh: F.gelu(approximate='tanh') keeps 8; masks of 2 bytes: 1 on a GPU",
        dropout=True,
    ),
    OtherLayer(
        "Hugging Face GPT-2, sdpa",
        "bfloat16",
        {"sbh": 66, "as²b": 12, "sb": 8},
        "with dropout sdpa falls back to its math form on a CPU, and keeps more than eager: turn dropout off",
        dropout=True,
    ),
    OtherLayer(
        "Hugging Face GPT-2, sdpa",
        "bfloat16",
        {"sbh": 56, "asb": 4, "sb": 8},
        "no scores without dropout; gelu_new keeps 32sbh as before",
    ),
    OtherLayer(
        "Hugging Face Mixtral's experts, eager",
        "bfloat16",
        {"sbh": 2, "sbκh": 6, "sbκf": 8, "sbE": 4, "sbκ": 32, "sb": 4},
        _EXPERTS,
    ),
    OtherLayer(
        "Hugging Face Mixtral's experts, grouped_mm",
        "bfloat16",
        {"sbh": 2, "sbκh": 4, "sbκf": 8, "sbE": 4, "sbκ": 40, "sb": 4, "E": 4},
        _EXPERTS,
    ),
    OtherLayer(
        "ours",
        "bfloat16",
        {"sbh": 12, "sbkd": 4, "sbf": 6, "asb": 4, "sb": 8},
        "nothing twice, nothing in a wider type",
    ),
    OtherLayer(
        "ours, elementwise",
        "bfloat16",
        {"sbh": 8, "sbkd": 4, "sbf": 4, "asb": 4, "sb": 8},
        "what needs no matrix product is made again",
    ),
    OtherLayer(
        "ours, experts", "bfloat16", {"sbh": 2, "sbκf": 6, "sbκ": 24}, "tokens are dispatched again in backward"
    ),
)


def _megatron(modules: tuple[str, ...], divided: dict[str, int], states: int, why: str) -> OtherLayer:
    name = f"megatron-core, TP + SP, {' + '.join(modules) or 'nothing'} run again"
    # Each checkpoint holds a generator state; the core's also the mask's kind, one int32.
    constant = 5056 * states + (4 if modules else 0)
    return OtherLayer(name, "bfloat16", {}, why, True, divided, True, constant, modules)


_TITAN = "torchtitan's style"
_COMPOSITE = "nn.RMSNorm is several operations on a CPU (8sbh + 4sb each; one kernel on a GPU, 2sbh + 4sb); silu(gate) lies beside gate and up"

FRAMEWORKS = (
    OtherLayer(
        f"{_TITAN}, DTensor, TP",
        "bfloat16",
        {"sbh": 20, "sb": 8},
        f"{_COMPOSITE}; tensor parallelism leaves norms and their outputs whole on each rank: cut the sequence too",
        divided={"sbh": 4, "sbkd": 4, "sbf": 8, "asb": 4},
    ),
    OtherLayer(
        f"{_TITAN}, DTensor, TP + SP",
        "bfloat16",
        {"sbh": 4},
        f"{_COMPOSITE}; both gathered norm outputs stay whole: keep the shard and gather again in backward",
        divided={"sbh": 20, "sbkd": 4, "sbf": 8, "asb": 4, "sb": 8},
        sequence_parallel=True,
    ),
    _megatron(
        (),
        {"sbh": 36, "as²b": 6, "sb": 8},
        0,
        "the paper's 34sbh + 5as²b, and masks of 2 bytes (1 on a GPU); its buffer for gathered inputs belongs to the process",
    ),
    _megatron(
        ("core_attn",),
        {"sbh": 36, "sb": 8},
        1,
        "drops the scores: 6as²b, 5 of them on a GPU; no matrix product but theirs",
    ),
    _megatron(
        ("core_attn", "layernorm"),
        {"sbh": 32},
        3,
        "layernorm drops both norms' outputs and statistics, 4sbh + 8sb, at no matrix product",
    ),
    _megatron(
        ("core_attn", "layernorm", "mlp"),
        {"sbh": 16},
        4,
        "mlp drops the GeLU's input and output, 16sbh, and runs both products again, 16sbh² FLOPs: rebuild the output "
        "from the input (8sbh), which takes none",
    ),
    OtherLayer(
        f"{_TITAN}, torch.compile",
        "bfloat16",
        {"sbh": 12, "sbkd": 4, "sbf": 6, "asb": 4, "sb": 8},
        "the compiler's partitioner keeps nothing twice and nothing upcast; it keeps what fused norms and gates could rebuild",
    ),
    OtherLayer(
        f"{_TITAN}, torch.compile, memory budget 0",
        "bfloat16",
        {"sbh": 10, "sbkd": 4, "asb": 4},
        "the least that torch's activation memory budget keeps: inputs of layer and second norm, Q, K, V and the attention's "
        "output; gate and up come from their products again",
        budget=0,
    ),
    OtherLayer(
        "Liger's RMSNorm, SwiGLU and RoPE in Hugging Face's Llama (on paper)",
        "bfloat16",
        {"sbh": 12, "sbkd": 4, "sbf": 6, "asb": 4, "sb": 8, "sd": 4},
        "each op saves its inputs and one float32 statistic a token; norm outputs and silu(gate) · up remain as inputs of products",
    ),
)
