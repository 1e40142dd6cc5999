"""The models that ``actmem plan`` knows by name: each predicts bytes, FLOPs and collectives for one rank of a layout.

There are the paper's GPTs (``PlannedGPT``), and today's decoders with or without experts (``PlannedLlama``).  Experts
are sharded among the t tensor-parallel ranks, or among more ranks (expert parallelism).  Context parallelism shards
every activation along the sequence; K and V are gathered for attention, and gathered again in backward.
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
from actmem.formulas.flops import forward_operations
from actmem.formulas.stages import check_stage, embedding_rows, output_rows
from actmem.formulas.states import State, parameter_counts
from actmem.recipes import PAPER_LAYER, Recompute
from actmem.rows import Row
from actmem_more.fp8 import fp8_rows
from actmem_more.llama_shape import LLAMA_MODELS, LlamaShape, own_context_shape
from actmem_more.llama_terms import context_collectives, forced_routed_tokens, llama_collectives, llama_rows
from actmem_tools.plan.optimizers import OPTIMIZERS, PRECISIONS, optimizer_of
from actmem_tools.tape.stage_tapes import StagePart, stage_part

#: Bytes that the loss moves for each logit: it reads 16 bits, writes a float32 copy, and then reads and writes that
#: three times, to subtract the maximum, for exp and to divide.
_LOSS_BYTES = 2 + 4 + 3 * 8


@dataclass(frozen=True)
class RankWork:
    """FLOPs and moved bytes of operations that one rank runs for one microbatch, such as a layer's forward pass.

    Attributes:
        matmul_flops: FLOPs of all matmuls.
        moved_bytes: bytes that all operations read from and write to memory, if each is a kernel of its own (unfused).
    """

    matmul_flops: int
    moved_bytes: int


class PlannedModel(ABC):
    """A model that the planner knows by name.  Methods take a layout, and predict for one rank of it.

    A layout is a ``Parallel``: it says how the GPUs share the model, and how large a microbatch is.

    Args:
        name: the model's name as the paper or its authors write it, such as "175B" or "llama3-70b".
        shape: the model's sizes, with the sequence length.

    Attributes:
        name: the model's name.
        shape: the model's sizes.  Their ``micro_batch_size`` is ignored; the layout's is used.
        recompute_modes: names of modes of recomputation, such as "none" and "full".  The first mode keeps the most in
            memory and is the fastest; each further mode keeps less and is slower.  Recomputation stops at the last
            tensor that backward reads.
        context_parallel: whether the model's layer can run with context parallelism.
        norm_vectors: how many parameter vectors of h elements the final norm has: 2 with a bias, else 1.
        tied_embeddings: whether embedding and output layer share one weight.
        learned_positions: whether the model learns a vector for each position.
        routing: how tokens are distributed to experts, "even" or "one-sided"; "" without experts.
        global_batch_size: sequences in one step, unless the user asks for another number.
        optimizer: the optimizer that trains the model, one of ``OPTIMIZERS``.
        precision: the dtypes of weights, gradients and states: "mixed", "bf16" or another key of ``PRECISIONS``.
        device_type: the kind of device whose kernels run, "cuda" or "cpu".  Some kernels save more on a CPU.
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
    precision = "mixed"
    device_type = "cuda"

    def __init__(self, name: str, shape: ModelShape | LlamaShape):
        self.name, self.shape = name, shape

    @property
    def states(self) -> tuple[State, ...]:
        """The bytes that training keeps for each parameter: a State each for weight, gradient and optimizer states."""
        return self.optimizer.all_states(self.precision)

    @property
    def num_layers(self) -> int:
        """How many layers the whole model has."""
        return self.shape.num_layers

    @property
    def seq_length(self) -> int:
        """How many tokens a sequence has."""
        return self.shape.seq_length

    def _with(self, **changed: Any) -> PlannedModel:
        other = copy(self)
        vars(other).update(changed)
        return other

    def with_sizes(self, **sizes: int) -> PlannedModel:
        """Return a copy of the model with the named sizes changed, such as ``seq_length=4096``.

        Raises: ConfigError on a size that no model of this kind can have.
        """
        return self._with(shape=self.shape.with_sizes(**sizes))

    def with_optimizer(self, optimizer: str, precision: str = "mixed") -> PlannedModel:
        """Return a copy of the model that is trained by this optimizer and in this precision.

        Args:
            optimizer: "adamw", "sgd" or another key of ``OPTIMIZERS``.
            precision: "mixed", "bf16-gradients", "bf16-states", "bf16" or "fp8" (``PRECISIONS``).

        Raises: ConfigError on an unknown optimizer or precision, or if this library has no fp8 formulas for the model.
        """
        check_choice("precision", precision, PRECISIONS)
        if precision == "fp8" and (not isinstance(self.shape, LlamaShape) or self.shape.num_experts):
            raise ConfigError("precision", f"fp8's rule is for layers like Llama's, without experts, not {self.name}'s")
        return self._with(optimizer=optimizer_of(optimizer), precision=precision)

    def check_verifiable(self) -> None:
        """Raise ConfigError if ``--verify`` can't run the optimizer's step: it runs AdamW in mixed precision only."""
        if not self.optimizer.is_default or self.precision != "mixed":
            rule = f"only adamw's mixed step is run here, not that of {self.optimizer.name}, {self.precision}"
            raise ConfigError("verify", rule)

    def on(self, device_type: str) -> PlannedModel:
        """Return a copy of the model that predicts the bytes which the kernels of one kind of device save for backward.

        Args:
            device_type: "cuda", the default of every model; or "cpu", where an emulated rank runs and is measured.
        """
        check_choice("device_type", device_type, RNG_STATE_BYTES)
        return self._with(device_type=device_type)

    def with_modes(self, modes: Sequence[str]) -> PlannedModel:
        """Return a copy of the model with only some of its modes of recomputation.

        Args:
            modes: names out of ``recompute_modes``, in any order.

        Raises: ConfigError on a mode that the model doesn't have.
        """
        for mode in modes:
            check_choice("recompute", mode, self.recompute_modes)
        return self._with(recompute_modes=tuple(mode for mode in self.recompute_modes if mode in modes))

    def with_routing(self, routing: str) -> PlannedModel:
        """Return a copy of the model with another routing of tokens to experts.

        Args:
            routing: "even": every expert gets equally many tokens; or "one-sided": all tokens go to the same experts,
                the worst case.

        Raises: ConfigError if the model has no experts.
        """
        if not self.routing:
            raise ConfigError("routing", f"{self.name} has no experts")
        check_choice("routing", routing, ("even", "one-sided"))
        return self._with(routing=routing)

    @abstractmethod
    def check(self, layout: Parallel) -> None:
        """Raise ConfigError if a layer can't be sharded among the layout's tensor- and context-parallel ranks."""

    @abstractmethod
    def rows(self, layout: Parallel, what: str) -> Sequence[Row]:
        """List what one rank saves for backward of one microbatch, in one layer or outside the layers.

        Args:
            layout: how the GPUs share the model.
            what: a mode of recomputation, such as "none", for one layer in that mode; "first" for the embedding; or
                "last" for the final norm, the output layer and the loss, with the logits.

        Returns: one row for each saved tensor.
        """

    @abstractmethod
    def part(self, layout: Parallel, what: str) -> StagePart:
        """Compute memory and FLOPs of one part of the model, such as a layer, on one rank for one microbatch.

        The formulas are read from a stored tape, a recorded run of this part (``tape.stage_tapes``).

        Args:
            layout: how the GPUs share the model.
            what: the part: "layer none", or another mode of recomputation after "layer", for one layer; "first" for the
                embedding; "last" for the final norm, the output layer and the loss; "whole" for "first" and "last"
                together.

        Returns: the FLOPs of forward and backward, and the bytes alive at the peaks of backward.
        """

    @abstractmethod
    def layer_parameters(self, layout: Parallel) -> int:
        """Count the parameters of one layer that one rank holds."""

    def expert_parameters(self, layout: Parallel) -> int:
        """Return one layer's expert parameters on one rank if more than t ranks share the experts (EP > TP); else 0.

        With EP > TP fewer ranks hold the same experts than hold the same other parameters, so ZeRO shards expert
        parameters among fewer ranks.  With EP = TP ZeRO shards expert parameters like all other parameters.
        """
        return 0

    @abstractmethod
    def layer_collectives(self, layout: Parallel, recompute: str) -> list[PredictedCollective]:
        """List the collectives of one layer among tensor-, context- and expert-parallel ranks, for one microbatch.

        The list has the collectives of forward, recomputation and backward; ``PredictedCollective.phase`` says in which
        of these each one runs.

        Args:
            layout: how the GPUs share the model.
            recompute: the layer's mode of recomputation, such as "none".
        """

    @abstractmethod
    def moved_bytes(self, layout: Parallel) -> int:
        """Count the bytes that one layer's forward pass moves on one rank for one microbatch.

        Every operation reads its inputs from the device's memory and writes its outputs there (no fused kernels).
        """

    @abstractmethod
    def moved_again_bytes(self, layout: Parallel, recompute: str) -> int:
        """Count the bytes that one rank reads and writes while backward recomputes one layer for one microbatch.

        Args:
            layout: how the GPUs share the model.
            recompute: the layer's mode of recomputation, such as "full".
        """

    def end_parameters(self, layout: Parallel, first: bool, last: bool) -> int:
        """Count the parameters outside layers that one rank holds.

        Args:
            layout: how the GPUs share the model.
            first: whether the rank has the embedding.
            last: whether the rank has the final norm and the output layer.
        """
        tables = int(first or last) if self.tied_embeddings else first + last
        vectors = first * self.learned_positions * self.seq_length + last * self.norm_vectors
        return self.shape.hidden_size * (tables * self.own_vocabulary(layout) + vectors)

    @property
    def num_parameters(self) -> int:
        """How many parameters the whole model has."""
        alone = Parallel()
        return self.num_layers * self.layer_parameters(alone) + self.end_parameters(alone, True, True)

    def own_vocabulary(self, layout: Parallel) -> int:
        """Return how many rows of the embedding one rank holds: v/t, with v rounded up to a multiple of t."""
        t = layout.tensor_parallel_size
        return padded_vocab_size(self.shape.vocab_size, t, multiple=1) // t

    def layer_work(self, layout: Parallel) -> RankWork:
        """Count FLOPs and moved bytes of one layer's forward pass on one rank, for one microbatch."""
        return RankWork(self.part(layout, "layer none").forward_flops, self.moved_bytes(layout))

    def added_work(self, layout: Parallel, recompute: str) -> RankWork:
        """Count the FLOPs and moved bytes that recomputation adds to one layer's backward pass.

        Args:
            layout: how the GPUs share the model.
            recompute: the layer's mode of recomputation, such as "full".
        """
        mode, none = (self.part(layout, f"layer {each}") for each in (recompute, "none"))
        return RankWork(mode.backward_flops - none.backward_flops, self.moved_again_bytes(layout, recompute))

    def last_work(self, layout: Parallel) -> RankWork:
        """Count FLOPs and moved bytes of the forward pass of output layer and loss, on one rank for one microbatch."""
        moved = _LOSS_BYTES * self.tokens(layout) * self.own_vocabulary(layout)
        return RankWork(self.part(layout, "last").forward_flops, moved)

    def model_flops(self, global_batch_size: int) -> int:
        """Count the FLOPs of one step of the whole model, on all GPUs together and without recomputation.

        Args:
            global_batch_size: sequences in the step.
        """
        layout = Parallel(micro_batch_size=global_batch_size)
        layer, end = (self.part(layout, what).forward_flops for what in ("layer none", "last"))
        return 3 * (self.num_layers * layer + end)

    def tokens(self, layout: Parallel) -> int:
        """Return how many tokens of one microbatch a context-parallel rank has: s·b/c."""
        return self.seq_length // layout.context_parallel_size * layout.micro_batch_size

    def hidden_elements(self, layout: Parallel) -> int:
        """Count the elements of a layer's input on one rank for one microbatch; the layer's output has equally many."""
        return self.tokens(layout) * self.shape.hidden_size // layout.sequence_parts

    def output_bytes(self, layout: Parallel) -> int:
        """Count the bytes that a rank of one stage sends to the next stage for one microbatch, in 16 bits."""
        return 2 * self.hidden_elements(layout)


class PlannedGPT(PlannedModel):
    """A GPT as in the paper, predicted by the paper's formulas.

    Args:
        name: the model's name.  If it is a key of ``PAPER_MODELS``, such as "175B", the global batch size is the
            paper's; otherwise 1.
        shape: the model's sizes.

    Attributes:
        recompute_modes: the modes of recomputation that a plan may use, from least to most recomputation.
    """

    shape: ModelShape
    recompute_modes: Sequence[str] = ("none", "selective", "elementwise", "full")
    context_parallel, learned_positions, tied_embeddings, norm_vectors = False, True, True, 2

    def __init__(self, name: str, shape: ModelShape):
        super().__init__(name, shape)
        self.global_batch_size = PAPER_MODELS[name].global_batch_size if name in PAPER_MODELS else 1

    def _one_layer(self, layout: Parallel) -> tuple[ModelShape, Parallel]:
        """Return the arguments of one layer's formulas: the shape with one layer and b, and ``layout.layer_axes``."""
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
        # *full* isn't listed: it recomputes all operations but the last.
        names = {"none": set(), "selective": core, "elementwise": core | {"layer norm 1", "layer norm 2", "GeLU"}}
        # Recomputation stops before the region's last matmul, whose output backward doesn't read, and so before the
        # layer's last dropout.
        matmuls, rest = PAPER_LAYER.recomputed_matmuls(recompute), names.get(recompute)
        recomputed = [o for o in operations if (o.name in matmuls if o.matmul else rest is None or o.name in rest)]
        return sum(o.bytes for o in recomputed if o.name != operations[-1].name)


class PlannedLlama(PlannedModel):
    """A Llama, or a model built like one, predicted by this library's formulas.

    Such a model has RMSNorm, rotary positions, grouped-query attention, gated MLPs or experts, and no biases.

    Args:
        name: the model's name, such as "llama3-70b".  It decides how many tokens a step has.
        shape: the model's sizes.
    """

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
        """Return the layer's shape on one context-parallel rank, with that rank's part of the sequence as seq_length.

        Raises: ConfigError if the ranks can't share the layer, or if the sequence can't be divided into two chunks for
            each context-parallel rank (``actmem_more.context``).
        """
        return own_context_shape(self._whole_shape(layout), layout)

    @lru_cache(maxsize=2**12)  # noqa: B019
    def rows(self, layout: Parallel, what: str) -> Sequence[Row]:
        tokens, t = self.tokens(layout), layout.tensor_parallel_size
        shards, hidden = layout.sequence_parts, 2 * self.hidden_elements(layout)
        if what == "first":
            return [Row("token ids", 4 * tokens, 1, "embedding")]
        if what == "last":
            return [
                Row("final RMSNorm input", hidden, shards, "residual stream"),
                Row("final RMSNorm statistic", 4 * tokens // shards, shards, "1/rms of each token"),
                Row("output layer input", hidden, shards, "weight gradient"),
                Row("logits (float32)", 4 * tokens * self.own_vocabulary(layout), t, "cross entropy"),
                Row("target ids", 4 * tokens, 1, "cross entropy"),
            ]
        check_choice("recompute", what, PlannedLlama.recompute_modes)
        rows = llama_rows(self._whole_shape(layout), layout, what, routed_tokens=self._routed(layout))
        return fp8_rows(rows) if self.precision == "fp8" else rows

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
        """Count the elements of one token's keys on one rank: kd/t, but at least those of one head."""
        return max(self.shape.num_key_value_heads // layout.tensor_parallel_size, 1) * self.shape.d

    def _routed(self, layout: Parallel) -> int | None:
        """Return R, the pairs of a token and an expert that rank 0 computes; None without experts.

        Rank 0 computes at least as many pairs as any other rank.
        """
        if not self.routing:
            return None
        return forced_routed_tokens(self._layer_shape(layout), layout, self.routing, 0)

    def _mlp_rows(self, layout: Parallel) -> int:
        """Count the elements of the gate projection's output on one rank; the up projection's output has as many.

        Without experts the output has this rank's columns for every token, with experts all columns for each of the R
        pairs of a token and an expert.
        """
        d, routed = self.shape, self._routed(layout)
        if routed is not None:
            return routed * d.ffn_hidden_size
        return self.tokens(layout) * d.ffn_hidden_size // layout.tensor_parallel_size

    def moved_bytes(self, layout: Parallel) -> int:
        d, tokens, hidden, wide = self.shape, self.tokens(layout), self.hidden_elements(layout), self._mlp_rows(layout)
        heads = tokens * (d.query_size // layout.tensor_parallel_size + self._key_value_size(layout))
        # First what linears, flash attention and SwiGLU read and write, with the weights; then norms, residual
        # additions and rotary positions.
        elements = 2 * d.hidden_size * tokens + 4 * heads + 3 * wide + self.layer_parameters(layout)
        elements += 10 * hidden + 2 * heads * (1 + d.qk_norm) + 3 * wide
        if (routed := self._routed(layout)) is None:
            return 2 * (elements + 2 * d.hidden_size * tokens)
        # With experts come their rows and the router's input, and a row for each pair of token and expert, which is
        # written, sorted, sent, sorted back and added up.
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
        """Count FLOPs and moved bytes of the forward pass of output layer and loss, on one rank for one microbatch.

        Unlike ``PlannedModel.last_work`` this also counts the bytes that the output layer's matmul moves.
        """
        work = super().last_work(layout)
        tokens, own, h = self.tokens(layout), self.own_vocabulary(layout), self.shape.hidden_size
        return RankWork(work.matmul_flops, work.moved_bytes + 2 * (tokens * (h + own) + h * own))


#: Tokens of a sequence, for models whose shape in LLAMA_MODELS has another length: Qwen3's in the first stage of
#: training (2505.09388), and Mixtral's (2401.04088).
_LENGTHS = {"qwen3-32b": 4096, "qwen3-30b-a3b": 4096, "mixtral-8x7b": 32768}
#: Tokens of one step: 16 million for Llama 3 405B (2407.21783 table 4); for others, whose papers state no number, Llama
#: 2's 4 million (2307.09288 section 2.2).
_STEP_TOKENS = {"llama3-405b": 2**24}
_USUAL_STEP_TOKENS = 2**22
#: All planned models by their names in lower case.
PLANNED_MODELS: dict[str, PlannedModel] = {
    **{name.lower(): PlannedGPT(name, model.shape) for name, model in PAPER_MODELS.items()},
    **{
        name: PlannedLlama(name, shape.with_sizes(seq_length=_LENGTHS.get(name, shape.seq_length)))
        for name, shape in LLAMA_MODELS.items()
        if not shape.latent
    },
}


def planned_model_of(name: str) -> PlannedModel:
    """Return the planned model with a given name.

    Args:
        name: a key of ``PLANNED_MODELS``, such as "175B" or "llama3-70b", in upper or lower case.

    Raises: ConfigError, which suggests similar names, if there is no such model.
    """
    model = PLANNED_MODELS.get(name.lower())
    if model is None:
        similar = difflib.get_close_matches(name.lower(), PLANNED_MODELS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(similar)}?" if similar else f"known: {', '.join(PLANNED_MODELS)}"
        raise ConfigError("model", f"{shown(name)} is not known; {hint}")
    return model
