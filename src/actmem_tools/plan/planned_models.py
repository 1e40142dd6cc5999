"""What the planner asks of a model: bytes, FLOPs and collectives of its layers, embedding and loss on one rank.

The paper's GPT, and today's decoders, with experts too, which the ranks of t share, or more than these.  Under context
parallelism everything is sharded along the sequence: K and V are gathered for attention, and again in backward.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from actmem.config import (
    PAPER_MODELS,
    ConfigError,
    ModelShape,
    Parallel,
    check_choice,
    padded_vocab_size,
    shown,
)
from actmem.formulas.activations import RNG_STATE_BYTES, layer_extra_rows, layer_rows
from actmem.formulas.communication import PredictedCollective, layer_collectives
from actmem.formulas.first_stage import check_stage, embedding_rows, output_rows
from actmem.formulas.flops import forward_operations
from actmem.formulas.states import State, parameter_counts
from actmem.recipes import PAPER_LAYER, Recompute
from actmem.rows import Row
from actmem_more.llama_shape import LLAMA_MODELS, LlamaShape, own_context_shape
from actmem_more.llama_terms import context_collectives, forced_routed_tokens, llama_collectives, llama_rows
from actmem_tools.plan.optimizers import OPTIMIZERS, optimizer_of
from actmem_tools.tape.stage_tapes import StagePart, stage_part

#: The loss reads 16-bit logits and passes over its float32 copy four times: made, shifted, exp, divided.
_LOSS_BYTES = 2 + 4 + 3 * 8


@dataclass(frozen=True)
class RankWork:
    """One rank's computation for one microbatch.

    matmul_flops: of matmuls.  moved_bytes: read and written by all other operations, each alone.
    """

    matmul_flops: int
    moved_bytes: int


class PlannedModel(ABC):
    """A model with its sequence length.  Methods take the layout; all numbers are of one rank.

    shape: its micro_batch_size is not used.  recompute_modes: names from the least recomputed to the most, each slower
    and smaller than the one before; they run to the last tensor that backward reads.  routing: of experts, "even" or
    "one-sided"; empty without them.  norm_vectors: of h elements, in the final norm.  global_batch_size: sequences of a
    step, if nothing else is asked for.  device_type: whose kernels keep what is billed.
    """

    shape: ModelShape | LlamaShape
    recompute_modes: Sequence[str]
    context_parallel: bool
    norm_vectors: int
    tied_embeddings: bool
    learned_positions = False
    routing = ""
    global_batch_size: int
    optimizer = OPTIMIZERS["adamw"]
    device_type = "cuda"

    def __init__(self, name: str, shape: ModelShape | LlamaShape):
        self.name, self.shape = name, shape

    @property
    def states(self) -> tuple[State, ...]:
        """What is kept of each parameter: weights, gradients, and what the optimizer keeps."""
        return self.optimizer.all_states

    @property
    def num_layers(self) -> int:
        """Layers of the whole model."""
        return self.shape.num_layers

    @property
    def seq_length(self) -> int:
        """Tokens of a sequence."""
        return self.shape.seq_length

    def _with(self, **changed: Any) -> PlannedModel:
        other = copy(self)
        vars(other).update(changed)
        return other

    def with_sizes(self, **sizes: int) -> PlannedModel:
        """The same model with other sizes of its shape.  Raises ConfigError on a bad one."""
        return self._with(shape=self.shape.with_sizes(**sizes))

    def with_optimizer(self, optimizer: str) -> PlannedModel:
        """The same model under another optimizer.  Raises ConfigError on an unknown one."""
        return self._with(optimizer=optimizer_of(optimizer))

    def check_verifiable(self) -> None:
        """Raises ConfigError if ``--verify`` can't run the optimizer's step."""
        if not self.optimizer.is_default:
            raise ConfigError("verify", f"only adamw's step is run here, not that of {self.optimizer.name}")

    def on(self, device_type: str) -> PlannedModel:
        """The same model as "cuda" keeps it, or "cpu", on which an emulated rank counts."""
        check_choice("device_type", device_type, RNG_STATE_BYTES)
        return self._with(device_type=device_type)

    def with_modes(self, modes: Sequence[str]) -> PlannedModel:
        """The same model with some of its recomputation modes only.

        Raises: ConfigError on an unknown one, or on none.
        """
        if not modes:
            raise ConfigError("recompute", "must name at least one mode")
        for mode in modes:
            check_choice("recompute", mode, self.recompute_modes)
        return self._with(recompute_modes=tuple(mode for mode in self.recompute_modes if mode in modes))

    def with_routing(self, routing: str) -> PlannedModel:
        """The same model with another routing of its experts.

        Args:
            routing: "even" loads, or "one-sided" ones: every token to the same experts, the worst case.

        Raises: ConfigError if it has no experts.
        """
        if not self.routing:
            raise ConfigError("routing", f"{self.name} has no experts")
        check_choice("routing", routing, ("even", "one-sided"))
        return self._with(routing=routing)

    @abstractmethod
    def check(self, layout: Parallel) -> None:
        """Raise ConfigError if t or context ranks can't share a layer."""

    @abstractmethod
    def rows(self, layout: Parallel, what: str) -> Sequence[Row]:
        """What is saved for backward of one microbatch.

        Args:
            what: a mode, for one layer under it; "first", for the embedding; or "last", for the final norm, the output
                layer and the loss, with the logits.
        """

    @abstractmethod
    def part(self, layout: Parallel, what: str) -> StagePart:
        """The tape of one layer or of embedding and loss, on one rank.

        Args:
            what: "layer none", or another mode; or of embedding and loss "first", "last" or "whole".
        """

    @abstractmethod
    def layer_parameters(self, layout: Parallel) -> int:
        """Elements of one layer."""

    def expert_parameters(self, layout: Parallel) -> int:
        """Of them those of experts, if other ranks hold the same ones than of the rest."""
        return 0

    @abstractmethod
    def layer_collectives(self, layout: Parallel, recompute: str) -> list[PredictedCollective]:
        """Collectives of one layer among tensor- and context-parallel ranks, forward and backward."""

    @abstractmethod
    def moved_bytes(self, layout: Parallel) -> int:
        """Bytes that one layer's forward pass reads and writes, each operation alone."""

    @abstractmethod
    def moved_again_bytes(self, layout: Parallel, recompute: str) -> int:
        """Those of recomputation."""

    def end_parameters(self, layout: Parallel, first: bool, last: bool) -> int:
        """Elements of the embedding, if ``first``, and of the final norm and output layer, if ``last``."""
        tables = int(first or last) if self.tied_embeddings else first + last
        vectors = first * self.learned_positions * self.seq_length + last * self.norm_vectors
        return self.shape.hidden_size * (tables * self.own_vocabulary(layout) + vectors)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        alone = Parallel()
        return self.num_layers * self.layer_parameters(alone) + self.end_parameters(alone, True, True)

    def own_vocabulary(self, layout: Parallel) -> int:
        """Rows of the embedding on one rank: v/t, after v is padded to a multiple of t."""
        t = layout.tensor_parallel_size
        return padded_vocab_size(self.shape.vocab_size, t, multiple=1) // t

    def layer_work(self, layout: Parallel) -> RankWork:
        """One layer's forward pass."""
        return RankWork(self.part(layout, "layer none").forward_flops, self.moved_bytes(layout))

    def added_work(self, layout: Parallel, recompute: str) -> RankWork:
        """What is recomputed in one layer."""
        mode, none = (self.part(layout, f"layer {each}") for each in (recompute, "none"))
        return RankWork(mode.backward_flops - none.backward_flops, self.moved_again_bytes(layout, recompute))

    def last_work(self, layout: Parallel) -> RankWork:
        """The output layer's forward pass, and the loss's."""
        moved = _LOSS_BYTES * self.tokens(layout) * self.own_vocabulary(layout)
        return RankWork(self.part(layout, "last").forward_flops, moved)

    def model_flops(self, global_batch_size: int) -> int:
        """FLOPs of one step of the whole model without recomputation."""
        layout = Parallel(micro_batch_size=global_batch_size)
        layer, end = (self.part(layout, what).forward_flops for what in ("layer none", "last"))
        return 3 * (self.num_layers * layer + end)

    def tokens(self, layout: Parallel) -> int:
        """Tokens of one microbatch on a context-parallel rank."""
        return self.seq_length // layout.context_parallel_size * layout.micro_batch_size

    def hidden_elements(self, layout: Parallel) -> int:
        """Elements of a layer's input and output on one rank."""
        return self.tokens(layout) * self.shape.hidden_size // layout.sequence_parts

    def output_bytes(self, layout: Parallel) -> int:
        """What one stage sends to the next for one microbatch, in 16 bits."""
        return 2 * self.hidden_elements(layout)


class PlannedGPT(PlannedModel):
    """The paper's model: its own formulas, asked for one layout after another."""

    shape: ModelShape
    recompute_modes: Sequence[str] = ("none", "selective", "elementwise", "full")
    context_parallel, learned_positions, tied_embeddings, norm_vectors = False, True, True, 2

    def __init__(self, name: str, shape: ModelShape):
        super().__init__(name, shape)
        self.global_batch_size = PAPER_MODELS[name].global_batch_size if name in PAPER_MODELS else 1

    def _one_layer(self, layout: Parallel) -> tuple[ModelShape, Parallel]:
        """The shape with one layer, and t with sequence parallelism: what one layer's formulas take."""
        return self.shape.with_sizes(micro_batch_size=layout.micro_batch_size, num_layers=1), layout.layer_axes

    def check(self, layout: Parallel) -> None:
        check_stage(*self._one_layer(layout))

    @lru_cache(maxsize=2**12)  # noqa: B019 a search asks for thousands of stages of the same layers
    def rows(self, layout: Parallel, what: str) -> Sequence[Row]:
        sizes = self._one_layer(layout)
        if what == "first":
            return embedding_rows(*sizes)
        if what == "last":
            return output_rows(*sizes, device_type=self.device_type)
        # The model makes one causal mask for all layers.
        extras = layer_extra_rows(*sizes, what, device_type=self.device_type)
        return layer_rows(*sizes, what) + [row for row in extras if row.term != "causal mask"]

    @lru_cache(maxsize=2**12)  # noqa: B019
    def part(self, layout: Parallel, what: str) -> StagePart:
        a, _, h, s = self.shape.letters()
        t = layout.tensor_parallel_size
        name = f"{what} {layout.shared}{' cuda' * (self.device_type == 'cuda')}"
        return stage_part("gpt", name, (s, layout.micro_batch_size, a // t, h // a, self.own_vocabulary(layout), t))

    def layer_parameters(self, layout: Parallel) -> int:
        return sum(parameter_counts(*self._one_layer(layout)).values()) - self.end_parameters(layout, True, True)

    def layer_collectives(self, layout: Parallel, recompute: str) -> list[PredictedCollective]:
        return layer_collectives(*self._one_layer(layout), recompute)

    def moved_bytes(self, layout: Parallel) -> int:
        return sum(operation.bytes for operation in forward_operations(*self._one_layer(layout)))

    def moved_again_bytes(self, layout: Parallel, recompute: str) -> int:
        operations = forward_operations(*self._one_layer(layout))
        core = {operation.name for operation in operations if operation.core}
        # *full* recomputes all but the last.
        names = {"none": set(), "selective": core, "elementwise": core | {"layer norm 1", "layer norm 2", "GeLU"}}
        # Recomputation stops before the region's last matmul, whose output backward doesn't read, and so
        # before the last dropout of the layer.
        matmuls, others = PAPER_LAYER.recomputed_matmuls(recompute), names.get(recompute)
        again = [o for o in operations if (o.name in matmuls if o.matmul else others is None or o.name in others)]
        return sum(o.bytes for o in again if o.name != operations[-1].name)


class PlannedLlama(PlannedModel):
    """Llama and its kin: RMSNorm, rotary positions, grouped-query attention, gated MLPs or experts, no biases."""

    shape: LlamaShape
    recompute_modes: Sequence[str] = ("none", "elementwise", "full")
    context_parallel, norm_vectors = True, 1

    def __init__(self, name: str, shape: LlamaShape):
        super().__init__(name, shape)
        self.routing, self.tied_embeddings = "even" if shape.num_experts else "", shape.tied_embeddings
        self.global_batch_size = max(1, _STEP_TOKENS.get(name, _USUAL_STEP_TOKENS) // shape.seq_length)

    def check(self, layout: Parallel) -> None:
        self._layer_shape(layout)

    def _whole_shape(self, layout: Parallel) -> LlamaShape:
        return self.shape.with_sizes(micro_batch_size=layout.micro_batch_size)

    def _layer_shape(self, layout: Parallel) -> LlamaShape:
        """One layer as a context-parallel rank sees it: its part of the sequence.

        Raises: ConfigError if the ranks can't share the layer, or the sequence in two chunks each
            (``actmem_more.context``).
        """
        return own_context_shape(self._whole_shape(layout), layout)

    @lru_cache(maxsize=2**12)  # noqa: B019
    def rows(self, layout: Parallel, what: str) -> Sequence[Row]:
        tokens, t = self.tokens(layout), layout.tensor_parallel_size
        whole, hidden = layout.sequence_parts, 2 * self.hidden_elements(layout)
        if what == "first":
            return [Row("token ids", 4 * tokens, 1, "embedding")]
        if what == "last":
            return [
                Row("final RMSNorm input", hidden, whole, "residual stream"),
                Row("final RMSNorm statistic", 4 * tokens // whole, whole, "1/rms of each token"),
                Row("output layer input", hidden, whole, "weight gradient"),
                Row("logits (float32)", 4 * tokens * self.own_vocabulary(layout), t, "cross entropy"),
                Row("target ids", 4 * tokens, 1, "cross entropy"),
            ]
        check_choice("recompute", what, PlannedLlama.recompute_modes)
        return llama_rows(self._whole_shape(layout), layout, what, routed_tokens=self._routed(layout))

    @lru_cache(maxsize=2**12)  # noqa: B019
    def part(self, layout: Parallel, what: str) -> StagePart:
        d, t, c = self.shape, layout.tensor_parallel_size, layout.context_parallel_size
        if what == "whole" and d.tied_embeddings:
            raise ConfigError("plan", f"no stage of {self.name} with tied embeddings has been recorded")
        sizes = (
            *(self.seq_length // c, layout.micro_batch_size, d.hidden_size, d.num_attention_heads // t),
            *(self._key_value_size(layout) // d.d, d.d, d.ffn_hidden_size // (1 if d.num_experts else t)),
            *(self.own_vocabulary(layout), t, c),
        )
        name = f"{what} {layout.shared}"
        if not what.startswith("layer"):
            return stage_part("llama", name, sizes)
        name += f"{' context' * (c > 1)}{' qk' * d.qk_norm}"
        if not d.num_experts:
            return stage_part("llama", name, sizes)
        ranks = layout.expert_ranks
        counts = d.num_experts // ranks, d.experts_per_token or 0, self._routed(layout) or 0
        if ranks > t:
            return stage_part("beside", f"{name} experts beside", (*sizes, *counts, ranks // t))
        return stage_part("experts", f"{name} experts", (*sizes, *counts))

    def layer_parameters(self, layout: Parallel) -> int:
        d, t = self.shape, layout.tensor_parallel_size
        own_heads = d.query_size // t + self._key_value_size(layout)
        shared = 2 * d.hidden_size * (own_heads + 1) + 2 * d.d * d.qk_norm
        if d.num_experts:
            return shared + d.num_experts * d.hidden_size + d.num_experts // layout.expert_ranks * d.mlp_weights
        return shared + d.mlp_weights // t

    def expert_parameters(self, layout: Parallel) -> int:
        experts = self.shape.num_experts or 0
        beside = layout.expert_ranks > layout.tensor_parallel_size
        return experts // layout.expert_ranks * self.shape.mlp_weights if beside else 0

    def layer_collectives(self, layout: Parallel, recompute: str) -> list[PredictedCollective]:
        shape = self._whole_shape(layout)
        return llama_collectives(shape, layout, recompute) + context_collectives(shape, layout, recompute=recompute)

    def _key_value_size(self, layout: Parallel) -> int:
        """Elements of one rank's keys for one token: kd/t, but at least one head."""
        return max(self.shape.num_key_value_heads // layout.tensor_parallel_size, 1) * self.shape.d

    def _routed(self, layout: Parallel) -> int | None:
        """Pairs of a token and an expert on rank 0, which takes most (R); None without experts."""
        if not self.routing:
            return None
        return forced_routed_tokens(self._layer_shape(layout), layout, self.routing, 0)

    def _mlp_rows(self, layout: Parallel) -> int:
        """Elements of gate, as of up: this rank's columns for every token, or its experts' for the tokens they take."""
        d, routed = self.shape, self._routed(layout)
        if routed is not None:
            return routed * d.ffn_hidden_size
        return self.tokens(layout) * d.ffn_hidden_size // layout.tensor_parallel_size

    def moved_bytes(self, layout: Parallel) -> int:
        d, tokens, hidden, wide = self.shape, self.tokens(layout), self.hidden_elements(layout), self._mlp_rows(layout)
        heads = tokens * (d.query_size // layout.tensor_parallel_size + self._key_value_size(layout))
        # Into and out of the linears and flash attention, and SwiGLU's three; then two norms and sums, and rotation.
        elements = 2 * d.hidden_size * tokens + 4 * heads + 3 * wide + self.layer_parameters(layout)
        elements += 10 * hidden + 2 * heads * (1 + d.qk_norm) + 3 * wide
        if (routed := self._routed(layout)) is None:
            return 2 * (elements + 2 * d.hidden_size * tokens)
        # The experts' rows and the router's input.  A row for each pair is written, sorted, sent, sorted back and
        # added up.
        pairs = hidden * (d.experts_per_token or 0)
        return 2 * (elements + 6 * d.hidden_size * routed + 3 * hidden + 6 * pairs)

    def moved_again_bytes(self, layout: Parallel, recompute: str) -> int:
        region = Recompute.of(recompute).region
        if region != "terms":
            return self.moved_bytes(layout) if region == "layer" else 0
        d, t, tokens = self.shape, layout.tensor_parallel_size, self.tokens(layout)
        heads = tokens * (d.query_size // t + self._key_value_size(layout)) if d.qk_norm else 0
        return 2 * (2 * 2 * self.hidden_elements(layout) + 3 * self._mlp_rows(layout) + 2 * 2 * heads)

    def last_work(self, layout: Parallel) -> RankWork:
        """With the bytes that the output layer moves."""
        work = super().last_work(layout)
        tokens, own, h = self.tokens(layout), self.own_vocabulary(layout), self.shape.hidden_size
        return RankWork(work.matmul_flops, work.moved_bytes + 2 * (tokens * (h + own) + h * own))


#: Tokens of a sequence in the first stage of training where it is not that of LLAMA_MODELS (2505.09388), and Mixtral's
#: only one (2401.04088).
_LENGTHS = {"qwen3-32b": 4096, "qwen3-30b-a3b": 4096, "mixtral-8x7b": 32768}
#: Tokens of a step: 16 million (2407.21783 table 4); of others, whose papers state none, Llama 2's 4 million
#: (2307.09288 section 2.2).
_STEP_TOKENS = {"llama3-405b": 2**24}
_USUAL_STEP_TOKENS = 2**22
#: By the name in lower case.
PLANNED_MODELS: dict[str, PlannedModel] = {
    **{name.lower(): PlannedGPT(name, model.shape) for name, model in PAPER_MODELS.items()},
    **{
        name: PlannedLlama(name, shape.with_sizes(seq_length=_LENGTHS.get(name, shape.seq_length)))
        for name, shape in LLAMA_MODELS.items()
        if not shape.latent
    },
}


def planned_model_of(name: str) -> PlannedModel:
    """The model of that name, in upper or lower case; ConfigError, with the nearest names, on another one."""
    model = PLANNED_MODELS.get(name.lower())
    if model is None:
        near = difflib.get_close_matches(name.lower(), PLANNED_MODELS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(PLANNED_MODELS)}"
        raise ConfigError("model", f"{shown(name)} is not known; {hint}")
    return model
