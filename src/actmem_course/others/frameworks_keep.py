"""What frameworks keep of a layer that they cut, compile or run again in part: rows beside ``others_keep``.

Formulas as there, with a second sum that the t tensor-parallel ranks divide.  Each is counted by
``measure_peers --today`` except those that say "on paper".  torch 2.13 and megatron-core 0.16.1, on CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from actmem.checks import ConfigError, check_divides, check_size
from actmem.llama_shape import LlamaShape
from actmem_course.others.others_keep import OtherLayer, bytes_of_other


@dataclass(frozen=True)
class FrameworkLayer(OtherLayer):
    """One framework's layer.  coefficients: whole on every rank; divided: shared by the t ranks.

    sequence_parallel: whether its ranks also cut the sequence.  constant_bytes: generator states and
    counters, whatever the sizes.  modules: what megatron-core's recompute_modules name.  budget: torch's
    activation memory budget.
    """

    divided: dict[str, int] = field(default_factory=dict)
    sequence_parallel: bool = False
    constant_bytes: int = 0
    modules: tuple[str, ...] = ()
    budget: float = 1

    @property
    def formula(self) -> str:
        """Such as ``4sbh + (20sbh + 4sbkd)/t``."""
        shared = " + ".join(f"{count}{product}" for product, count in self.divided.items())
        constant = f"{self.constant_bytes:,}" if self.constant_bytes else ""
        whole = super().formula
        return " + ".join(part for part in (whole, f"({shared})/t" if shared else "", constant) if part)


def bytes_of_framework(layer: FrameworkLayer, shape: LlamaShape, tensor_parallel_size: int = 1) -> int:
    """Its bytes on one of ``tensor_parallel_size`` ranks.  Raises ConfigError where they can't share the layer."""
    t = check_size("tensor_parallel_size", tensor_parallel_size)
    if t > 1 and not layer.divided:
        raise ConfigError("tensor_parallel_size", f"nothing cuts this layer: must be 1, got {t}")
    for name in ("num_attention_heads", "num_key_value_heads", "ffn_hidden_size"):
        check_divides(name, getattr(shape, name), "tensor_parallel_size", t)
    if layer.sequence_parallel:
        check_divides("seq_length", shape.seq_length, "tensor_parallel_size", t)
    shared = OtherLayer(layer.name, layer.dtype, layer.divided, "")
    return bytes_of_other(layer, shape) + bytes_of_other(shared, shape) // t + layer.constant_bytes


def _megatron(modules: tuple[str, ...], divided: dict[str, int], states: int, why: str) -> FrameworkLayer:
    name = f"megatron-core, TP + SP, {' + '.join(modules) or 'nothing'} run again"
    # Each checkpoint holds a generator state; the core's also the mask's kind, one int32.
    constant = 5056 * states + (4 if modules else 0)
    return FrameworkLayer(name, "bfloat16", {}, why, True, divided, True, constant, modules)


_TITAN = "torchtitan's style"
_COMPOSITE = "nn.RMSNorm is several operations on a CPU (8sbh + 4sb each; one kernel on a GPU, 2sbh + 4sb); silu(gate) lies beside gate and up"

FRAMEWORKS = (
    FrameworkLayer(
        f"{_TITAN}, DTensor, TP",
        "bfloat16",
        {"sbh": 20, "sb": 8},
        f"{_COMPOSITE}; tensor parallelism leaves norms and their outputs whole on each rank: cut the sequence too",
        divided={"sbh": 4, "sbkd": 4, "sbf": 8, "asb": 4},
    ),
    FrameworkLayer(
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
    FrameworkLayer(
        f"{_TITAN}, torch.compile",
        "bfloat16",
        {"sbh": 12, "sbkd": 4, "sbf": 6, "asb": 4, "sb": 8},
        "the compiler's partitioner keeps nothing twice and nothing upcast; it keeps what fused norms and gates could rebuild",
    ),
    FrameworkLayer(
        f"{_TITAN}, torch.compile, memory budget 0",
        "bfloat16",
        {"sbh": 10, "sbkd": 4, "asb": 4},
        "the least that torch's activation memory budget keeps: inputs of layer and second norm, Q, K, V and the attention's "
        "output; gate and up come from their products again",
        budget=0,
    ),
    FrameworkLayer(
        "Liger's RMSNorm, SwiGLU and RoPE in Hugging Face's Llama (on paper)",
        "bfloat16",
        {"sbh": 12, "sbkd": 4, "sbf": 6, "asb": 4, "sb": 8, "sd": 4},
        "each op saves its inputs and one float32 statistic a token; norm outputs and silu(gate) · up remain as inputs of products",
    ),
)
