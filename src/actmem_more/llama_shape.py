"""Sizes of Llama-like layers, the sizes of published models, and which tensors such a layer saves.

Nothing in this file needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from actmem.config import ConfigError, Parallel, check_choice, check_divides, check_size, shown
from actmem.recipes import LayerTerms, Recipe

#: How c ranks share a sequence, see ``actmem_more.context``.  "gather" gathers K and V, and again in backward;
#: "gather-plain" gathers and saves them; "ulysses" runs all-to-alls from tokens to heads and back.
CONTEXT_KINDS = ("gather", "gather-plain", "ulysses")


@dataclass(frozen=True)
class LatentHeads:
    """Sizes of multi-head latent attention (2405.04434 section 2.1), in elements for one token.

    Args:
        query_rank: elements of the latent from which queries are computed.
        key_value_rank: elements of the latent from which keys and values are computed.
        nope_head_size: elements of the part of a head's query, and of its key, that has no position.
        rope_head_size: elements of the part of a head's query that is rotated, and of the key that all heads share.
        value_head_size: elements of a head's value.

    Raises: ConfigError on a size that is no whole number of at least 1, or if rope_head_size is odd.
    """

    query_rank: int
    key_value_rank: int
    nope_head_size: int
    rope_head_size: int
    value_head_size: int

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            check_size(name, getattr(self, name))
        _check_even("rope_head_size", self.rope_head_size)


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama-like model, in elements if nothing else is said.

    Args:
        seq_length: s, tokens of one sequence.
        micro_batch_size: b, sequences of one microbatch.
        hidden_size: h, elements of one token's activation.
        num_attention_heads: a, number of query heads.
        num_key_value_heads: k, number of key and value heads; with ``latent`` it must be a.
        ffn_hidden_size: f, width of the gated MLP, or of each expert.
        head_size: d, elements of one head's query and key; None: h/a.
        qk_norm: whether an RMSNorm normalises each head's query and key.
        num_experts: E, number of experts; None: one gated MLP for all tokens.
        experts_per_token: κ, how many of the E experts each token goes to.
        num_shared_experts: number of further experts of width f to which every token goes; they are one MLP.
        sigmoid_router: whether the router weighs an expert by the sigmoid of its score instead of a softmax.
        latent: sizes of latent attention; None: grouped-query attention.
        num_layers: L, number of layers.
        vocab_size: v, words of the vocabulary.
        tied_embeddings: whether the output layer uses the word embedding's weight.

    Raises: ConfigError on a size that is no whole number of at least 1, if k does not divide a, if d is odd, or on
        sizes that contradict each other, such as ``experts_per_token`` without ``num_experts``.
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
    num_shared_experts: int | None = None
    sigmoid_router: bool = False
    latent: LatentHeads | None = None
    num_layers: int = 1
    vocab_size: int = 128256
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for name, field in self.__dataclass_fields__.items():
            value = getattr(self, name)
            if isinstance(field.default, bool):
                check_choice(name, value, (False, True))
            elif name != "latent" and (value is not None or field.default is not None):
                check_size(name, value)
        if (self.num_experts is None) != (self.experts_per_token is None):
            raise ConfigError("experts_per_token", "goes with num_experts: give both or none")
        if (self.experts_per_token or 0) > (self.num_experts or 0):
            raise ConfigError("experts_per_token", f"must be at most num_experts = {self.num_experts}")
        for name in ("num_shared_experts", "sigmoid_router"):
            if getattr(self, name) and not self.num_experts:
                raise ConfigError(name, "goes with num_experts: give both or none")
        a, k = self.num_attention_heads, self.num_key_value_heads
        if self.latent is not None:
            self._check_latent(self.latent)
            return
        check_divides("num_attention_heads", a, "num_key_value_heads", k)
        if self.head_size is None:
            check_divides("hidden_size", self.hidden_size, "num_attention_heads", a)
        _check_even("head_size", self.d)

    def _check_latent(self, latent: object) -> None:
        if not isinstance(latent, LatentHeads):
            raise ConfigError("latent", f"must be of type LatentHeads, got {shown(latent)}")
        for name in ("head_size", "qk_norm"):
            if getattr(self, name):
                raise ConfigError(name, "latent attention has sizes and norms of its own: leave it out")
        a, k = self.num_attention_heads, self.num_key_value_heads
        if k != a:
            raise ConfigError("num_key_value_heads", f"latent attention has a key for each of {a} query heads, got {k}")

    @property
    def d(self) -> int:
        """Elements of one head's query and key."""
        if self.latent:
            return self.latent.nope_head_size + self.latent.rope_head_size
        return self.head_size or self.hidden_size // self.num_attention_heads

    @property
    def value_size(self) -> int:
        """Elements of one head's value: d, except in latent attention."""
        return self.latent.value_head_size if self.latent else self.d

    @property
    def query_size(self) -> int:
        """Elements of all heads' queries for one token: ad, which is h in most models."""
        return self.num_attention_heads * self.d

    @property
    def key_value_size(self) -> int:
        """Elements of all heads' keys for one token: kd."""
        return self.num_key_value_heads * self.d

    @property
    def attention_weights(self) -> int:
        """Weights of attention's four linears in one layer, in elements: 2h·ad for Q and output, 2h·kd for K and V.

        The number does not hold for latent attention, which has other linears.
        """
        return 2 * self.hidden_size * (self.query_size + self.key_value_size)

    @property
    def mlp_weights(self) -> int:
        """Weights of one gated MLP, in elements: 3hf for gate, up and down. With experts a layer has E such MLPs."""
        return 3 * self.hidden_size * self.ffn_hidden_size

    @property
    def shared_ffn_size(self) -> int:
        """Width of the shared experts' MLP, to which every token goes; 0 if there is none."""
        return self.ffn_hidden_size * (self.num_shared_experts or 0)

    def with_sizes(self, **sizes: Any) -> LlamaShape:
        """Return a copy with the named sizes changed, as in ``seq_length=4096``; it is checked like a new shape."""
        return replace(self, **sizes)


def _check_even(name: str, size: int) -> None:
    if size % 2:
        raise ConfigError(name, f"{size} must be even: rotary positions turn pairs of elements")


def _decoder(h: int, f: int, a: int, k: int, layers: int, vocab_size: int = 128256, **options: Any) -> LlamaShape:
    return LlamaShape(8192, 1, h, a, k, f, num_layers=layers, vocab_size=vocab_size, **options)


_QWEN3: dict[str, Any] = {"vocab_size": 151936, "head_size": 128, "qk_norm": True}
_DEEPSEEK: dict[str, Any] = {"vocab_size": 129280, "latent": LatentHeads(1536, 512, 128, 64, 128)}
_256_EXPERTS = {"num_experts": 256, "experts_per_token": 8, "num_shared_experts": 1, "sigmoid_router": True}
#: Each model with sequences of 8,192 tokens.  Sources: each model's published config.json
#: (meta-llama/Meta-Llama-3-8B and -70B, meta-llama/Llama-3.1-405B, Qwen/Qwen3-32B and Qwen3-30B-A3B,
#: mistralai/Mixtral-8x7B-v0.1, deepseek-ai/DeepSeek-V3), 2407.21783 table 3 and 2412.19437 section 4.2.
LLAMA_MODELS = {
    "llama3-8b": _decoder(4096, 14336, 32, 8, 32),
    "llama3-70b": _decoder(8192, 28672, 64, 8, 80),
    "llama3-405b": _decoder(16384, 53248, 128, 8, 126),
    "qwen3-32b": _decoder(5120, 25600, 64, 8, 64, **_QWEN3),
    "qwen3-30b-a3b": _decoder(2048, 768, 32, 4, 48, **_QWEN3, num_experts=128, experts_per_token=8),
    "mixtral-8x7b": _decoder(4096, 14336, 32, 8, 32, 32000, num_experts=8, experts_per_token=2),
    # DeepSeek-V3 has 58 layers with experts; its first three layers have one MLP each.
    "deepseek-v3": _decoder(7168, 2048, 128, 128, 58, **_DEEPSEEK, **_256_EXPERTS),
    "deepseek-v3-dense": _decoder(7168, 18432, 128, 128, 3, **_DEEPSEEK),
}
#: Small enough for two processes on a laptop; all sizes differ.
TINY_LLAMA = LlamaShape(64, 2, 128, 8, 4, 352)


def llama_shape(model: str) -> LlamaShape:
    """Return the sizes of a model by its name.

    Args:
        model: "tiny-llama" for ``TINY_LLAMA``, or a key of ``LLAMA_MODELS``, such as "llama3-8b" or "deepseek-v3".

    Raises: ConfigError on another name.
    """
    check_choice("model", model, ("tiny-llama", *LLAMA_MODELS))
    return TINY_LLAMA if model == "tiny-llama" else LLAMA_MODELS[model]


def check_llama_ranks(shape: LlamaShape, parallel: Parallel) -> None:
    """Raise ConfigError if t ranks can't share one layer of this shape.

    t must divide a, the width of the shared experts, s under sequence parallelism, and without experts f. The number of
    ranks that share experts must divide the number of experts. Of t and k one must divide the other: with t > k, t/k
    ranks hold the same key and value head.

    Args:
        shape: the sizes of the layer.
        parallel: how the ranks share the layer; tensor, sequence and expert parallelism are read.
    """
    t = parallel.tensor_parallel_size
    check_divides("num_attention_heads", shape.num_attention_heads, "tensor_parallel_size", t)
    if shape.num_experts:
        experts_of_a_rank(shape.num_experts, parallel)
    else:
        check_divides("ffn_hidden_size", shape.ffn_hidden_size, "tensor_parallel_size", t)
    check_divides("the shared experts' width", shape.shared_ffn_size, "tensor_parallel_size", t)
    k = shape.num_key_value_heads
    if k % t and t % k:
        raise ConfigError("num_key_value_heads", f"{k} must divide tensor_parallel_size = {t}, or be divisible by it")
    if parallel.sequence_parallel:
        check_divides("seq_length", shape.seq_length, "tensor_parallel_size", t)


def experts_of_a_rank(num_experts: int, parallel: Parallel) -> int:
    """Return how many experts each rank holds.

    Args:
        num_experts: E, experts of one layer.
        parallel: how the ranks share the layer; ``expert_parallel_size`` ranks share the experts, or t if it is None.

    Raises: ConfigError if this number of ranks does not divide E.
    """
    kind = "expert" if parallel.expert_ranks > parallel.tensor_parallel_size else "tensor"
    return check_divides("num_experts", num_experts, f"{kind}_parallel_size", parallel.expert_ranks)


def own_context_shape(shape: LlamaShape, parallel: Parallel = Parallel(), context_kind: str = "gather") -> LlamaShape:
    """Return the shape of a layer on one of c context-parallel ranks: a copy of ``shape`` with s/c tokens.

    Under "gather" and "gather-plain" 2c must divide s, because each rank has two chunks. Under "ulysses" c must divide
    s, and t·c must divide k, because no head is split.

    Args:
        shape: the sizes of the layer, with the whole sequence.
        parallel: how the ranks share the layer; ``context_parallel_size`` is c.
        context_kind: how the c ranks share a sequence: "gather", "gather-plain" or "ulysses" (``CONTEXT_KINDS``).

    Raises: ConfigError if c·t ranks can't share the layer.
    """
    check_choice("context_kind", context_kind, CONTEXT_KINDS)
    c = parallel.context_parallel_size
    if c > 1 and shape.latent:
        raise ConfigError("context_parallel_size", f"must be 1, got {c}: no latent attention here shares a sequence")
    if c > 1 and context_kind == "ulysses":
        ranks = parallel.tensor_parallel_size * c
        check_divides(
            "num_key_value_heads", shape.num_key_value_heads, "tensor_parallel_size · context_parallel_size", ranks
        )
        check_divides("seq_length", shape.seq_length, "context_parallel_size", c)
    elif c > 1:
        check_divides("seq_length", shape.seq_length, "2 · context_parallel_size", 2 * c)
    shape = shape.with_sizes(seq_length=shape.seq_length // c)
    check_llama_ranks(shape, parallel)
    return shape


# Today's layers (RMSNorm, rotated Q and K, grouped-query attention, SwiGLU, no dropout, no biases).  A model that
# normalises the query and key of each head (Qwen3) saves them before that norm as well.  A model with experts saves
# which token goes to which expert, and the experts' tensors in place of one MLP's.  Latent attention (DeepSeek) saves
# the latents, or Q, K and V made from them, or both.
_QKV = ("QKV projection",)
_SCORES = ("QKᵀ", "attention over V")

_ROTATED = tuple(Recipe(term, ("QKV projection input",), _QKV) for term in "QKV")
#: *elementwise* drops Q and K, which are a norm and a rotation away from what the matmul made.
_NORMALISED = (
    Recipe("Q before its norm", ("QKV projection input",), _QKV),
    Recipe("Q", ("Q before its norm",)),
    Recipe("K before its norm", ("QKV projection input",), _QKV),
    Recipe("K", ("K before its norm",)),
    Recipe("V", ("QKV projection input",), _QKV),
)
#: "KV latent" is one tensor, the latent and the key with positions that all heads share: what inference caches.
_LATENT = (
    Recipe("Q latent", ("QKV projection input",), ("Q down-projection",)),
    Recipe("Q up-projection input", ("Q latent",)),
    Recipe("Q", ("Q up-projection input",), ("Q up-projection",)),
    Recipe("KV latent", ("QKV projection input",), ("KV down-projection",)),
    Recipe("KV up-projection input", ("KV latent",)),
    Recipe("K", ("KV up-projection input", "KV latent"), ("KV up-projection",)),
    Recipe("V", ("KV up-projection input",), ("KV up-projection",)),
)
_GATED_MLP = (
    Recipe("gate and up input", ("norm 2 input",)),
    Recipe("gate", ("gate and up input",), ("gate and up",)),
    Recipe("up", ("gate and up input",), ("gate and up",)),
    Recipe("down input", ("gate", "up")),
)
_EXPERTS = (
    Recipe("router input", ("norm 2 input",)),
    Recipe("chosen experts", ("router input",), ("router",)),
    Recipe("routing weights", ("router input",), ("router",)),
    Recipe("dispatch order", ("chosen experts",)),
    Recipe("dispatched weights", ("routing weights", "dispatch order")),
    Recipe("gate", ("router input", "dispatch order"), ("gate and up",)),
    Recipe("up", ("router input", "dispatch order"), ("gate and up",)),
    Recipe("down input", ("gate", "up", "dispatched weights")),
)
_SHARED_EXPERTS = (
    Recipe("shared gate", ("router input",), ("shared gate and up",)),
    Recipe("shared up", ("router input",), ("shared gate and up",)),
    Recipe("shared down input", ("shared gate", "shared up")),
)


#: Under context parallelism by all-to-all: the kernel has all tokens of some heads, the projection some tokens of all.
_EXCHANGED = (
    Recipe("attention output before all-to-all", ("Q", "K", "V"), _SCORES),
    Recipe("attention projection input", ("attention output before all-to-all",)),
)


def llama_layer_terms(shape: LlamaShape, ulysses: bool = False) -> LayerTerms:
    """Return a LayerTerms: the tensors that a layer of this shape saves, and from which others each can be recomputed.

    Args:
        shape: the sizes of the layer. Which tensors are saved depends on ``latent``, ``qk_norm`` and the experts.
        ulysses: True for context parallelism of the kind "ulysses", which saves attention's output twice, before and
            after its all-to-all.
    """
    terms = _layer(shape.latent is not None, shape.qk_norm, shape.num_experts is not None, shape.shared_ffn_size > 0)
    if not ulysses:
        return terms
    recipes = [_EXCHANGED if each.term == "attention projection input" else (each,) for each in terms.recipes]
    return replace(terms, recipes=tuple(each for group in recipes for each in group))


def input_on_host(terms: LayerTerms) -> dict[str, str]:
    """Return a layer's ``recompute`` for full recomputation with the layer's input offloaded to the host.

    Args:
        terms: the table of the layer's tensors, from ``llama_layer_terms``.

    Returns: a dict from tensors' names to "recompute", and from the input's name to "offload".
    """
    again = (*(recipe.term for recipe in terms.recipes), *terms.statistics)
    return {**dict.fromkeys(again, "recompute"), terms.input: "offload"}


@cache
def _layer(latent: bool, qk_norm: bool, experts: bool, shared: bool) -> LayerTerms:
    heads = _LATENT if latent else _NORMALISED if qk_norm else _ROTATED
    mlp = (*_EXPERTS, *_SHARED_EXPERTS * shared) if experts else _GATED_MLP
    normed = (("Q", "K") if qk_norm else ()) + (("Q latent", "KV latent") if latent else ())
    return LayerTerms(
        "norm 1 input",
        (
            Recipe("QKV projection input", ("norm 1 input",)),
            *heads,
            Recipe("log-sum-exp", ("Q", "K", "V"), _SCORES),
            Recipe("attention projection input", ("Q", "K", "V"), _SCORES),
            Recipe("norm 2 input", ("norm 1 input", "attention projection input"), ("attention projection",)),
            *mlp,
        ),
        core=frozenset({"log-sum-exp"}),
        core_elementwise=False,
        last_matmuls={"layer": ("down",) + ("shared down",) * shared},
        by_products=frozenset({"log-sum-exp"}),
        other_dtype=frozenset(recipe.term for recipe in _EXPERTS[1:5]),
        statistics=("norm 1 statistics", "norm 2 statistics", *(f"{name} norm statistics" for name in normed)),
    )
