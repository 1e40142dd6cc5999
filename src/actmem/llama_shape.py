"""Sizes of today's decoder layer, and of models that publish theirs.  Nothing in this file needs torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from actmem.checks import LARGEST_PARALLEL_SIZE, ConfigError, check_choice, check_divides, check_size, checked, shown
from actmem.config import Parallel

#: How c ranks share a sequence, see ``today.context``: K and V gathered, and again in backward; gathered and
#: kept; or all-to-alls from tokens to heads and back.
CONTEXT_KINDS = ("gather", "gather-plain", "ulysses")

_MAY_BE_NONE = ("head_size", "num_experts", "experts_per_token")


@dataclass(frozen=True)
class LlamaShape:
    """One layer's sizes, with the letters of formulas in brackets.

    seq_length (s), micro_batch_size (b), hidden_size (h), num_attention_heads (a),
    num_key_value_heads (k), ffn_hidden_size (f): width of the gated MLP; head_size (d), h/a if None.
    qk_norm: an RMSNorm over the query and the key of each head.  num_experts (E): MLPs of which each token
    takes experts_per_token (κ); None: one for all.  Raises ConfigError on a size that no layer can have.
    """

    seq_length: int
    micro_batch_size: int
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    ffn_hidden_size: int
    head_size: int | None = None
    qk_norm: bool = False
    num_experts: int | None = None
    experts_per_token: int | None = None

    def __post_init__(self) -> None:
        check_choice("qk_norm", self.qk_norm, (False, True))
        for name in self.__dataclass_fields__:
            if name != "qk_norm" and (name not in _MAY_BE_NONE or getattr(self, name) is not None):
                check_size(name, getattr(self, name))
        if (self.num_experts is None) != (self.experts_per_token is None):
            raise ConfigError("experts_per_token", "goes with num_experts: give both or none")
        if (self.experts_per_token or 0) > (self.num_experts or 0):
            raise ConfigError("experts_per_token", f"must be at most num_experts = {self.num_experts}")
        a, k = self.num_attention_heads, self.num_key_value_heads
        check_divides("num_attention_heads", a, "num_key_value_heads", k)
        if self.head_size is None:
            check_divides("hidden_size", self.hidden_size, "num_attention_heads", a)
        if self.d % 2:
            raise ConfigError("head_size", f"{self.d} must be even: rotary positions turn pairs of elements")

    @property
    def d(self) -> int:
        """Elements of one head."""
        return self.head_size or self.hidden_size // self.num_attention_heads

    def with_sizes(self, **sizes: Any) -> LlamaShape:
        """A copy with some sizes changed, checked again."""
        return replace(self, **sizes)


def _decoder(h: int, f: int, a: int, k: int, **options: Any) -> LlamaShape:
    return LlamaShape(8192, 1, h, a, k, f, **options)


#: One layer of each model, at 8,192 tokens.  Sources: each model's published config.json
#: (meta-llama/Meta-Llama-3-8B and -70B, meta-llama/Llama-3.1-405B, Qwen/Qwen3-32B and Qwen3-30B-A3B,
#: mistralai/Mixtral-8x7B-v0.1), and 2407.21783 table 3.
LLAMA_MODELS = {
    "llama3-8b": _decoder(4096, 14336, 32, 8),
    "llama3-70b": _decoder(8192, 28672, 64, 8),
    "llama3-405b": _decoder(16384, 53248, 128, 8),
    "qwen3-32b": _decoder(5120, 25600, 64, 8, head_size=128, qk_norm=True),
    "qwen3-30b-a3b": _decoder(2048, 768, 32, 4, head_size=128, qk_norm=True, num_experts=128, experts_per_token=8),
    "mixtral-8x7b": _decoder(4096, 14336, 32, 8, num_experts=8, experts_per_token=2),
}
#: Small enough for two processes on a laptop; all sizes differ.
TINY_LLAMA = LlamaShape(64, 2, 128, 8, 4, 352)


@checked
def llama_shape(model: str) -> LlamaShape:
    """The layer of ``tiny-llama`` or of a named model; ConfigError on another name."""
    if model == "tiny-llama":
        return TINY_LLAMA
    if model not in LLAMA_MODELS:
        raise ConfigError("model", f"must be one of tiny-llama, {', '.join(LLAMA_MODELS)}, got {shown(model)}")
    return LLAMA_MODELS[model]


@checked
def check_llama_ranks(shape: LlamaShape, parallel: Parallel) -> None:
    """Raise ConfigError if t ranks can't share one layer of this shape.

    t must divide a, f or else the number of experts, and s under sequence parallelism.  Of t and k one must divide the other:
    with t > k, t/k ranks hold the same key and value head.
    """
    t = parallel.tensor_parallel_size
    check_divides("num_attention_heads", shape.num_attention_heads, "tensor_parallel_size", t)
    shared = "num_experts" if shape.num_experts else "ffn_hidden_size"
    check_divides(shared, getattr(shape, shared), "tensor_parallel_size", t)
    k = shape.num_key_value_heads
    if k % t and t % k:
        raise ConfigError("num_key_value_heads", f"{k} must divide tensor_parallel_size = {t}, or be divisible by it")
    if parallel.sequence_parallel:
        check_divides("seq_length", shape.seq_length, "tensor_parallel_size", t)


@checked
def own_context_shape(
    shape: LlamaShape, parallel: Parallel = Parallel(), context_parallel_size: int = 1, context_kind: str = "gather"
) -> LlamaShape:
    """The layer as one of c context-parallel ranks sees it, with s/c tokens.  Raises ConfigError if c·t ranks can't share it.

    2c must divide s where K and V are gathered, because each rank holds two chunks.  Under "ulysses" c must
    divide s, and t·c the key and value heads: a rank attends with whole heads.
    """
    check_choice("context_kind", context_kind, CONTEXT_KINDS)
    c = check_size("context_parallel_size", context_parallel_size, LARGEST_PARALLEL_SIZE)
    if context_kind == "ulysses":
        heads, of = shape.num_key_value_heads, c * parallel.tensor_parallel_size
        if c > 1 and heads % of:
            rule = "must be divisible by tensor_parallel_size · context_parallel_size"
            raise ConfigError("num_key_value_heads", f"{heads} {rule} = {of} under ulysses")
        own = check_divides("seq_length", shape.seq_length, "context_parallel_size", c)
    else:
        if c > 1 and shape.seq_length % (2 * c):
            rule = f"{shape.seq_length} must be divisible by 2 · context_parallel_size = {2 * c}"
            raise ConfigError("seq_length", f"{rule}: each rank holds two chunks")
        own = shape.seq_length // c
    shape = shape.with_sizes(seq_length=own)
    check_llama_ranks(shape, parallel)
    return shape
