"""Today's decoder for the planner: Llama and its kin, with experts too, which the ranks of t share."""

from __future__ import annotations

from copy import copy

from actmem.checks import ConfigError, check_choice, check_size
from actmem.plan.layout import Layout
from actmem.plan.llama_backward import LlamaBackward
from actmem.plan.llama_rows import (
    LLAMA_MODES,
    check_llama_layer,
    llama_layer_rows,
    own_key_value_size,
    own_llama_shape,
    own_tokens,
)
from actmem.plan.llama_work import LlamaWork
from actmem.plan.planned_model import PlannedModel
from actmem.rows import Row, total
from actmem.tape.stage_tapes import StagePart


class PlannedLlama(LlamaWork):
    """decoder: its sizes.  seq_length: the model's own, unless ``with_sequence`` changes it.  routing: of experts, see ``with_routing``."""

    recompute_modes = LLAMA_MODES
    context_parallel = True

    def with_routing(self, routing: str) -> PlannedLlama:
        """The same model whose router sends "even" loads, or "one-sided" ones: every token to the same experts, the worst case."""
        if self.decoder.num_experts is None:
            raise ConfigError("routing", f"{self.name} has no experts")
        check_choice("routing", routing, ("even", "one-sided"))
        other = copy(self)
        other.routing = routing
        return other

    def refusal(self, layout: Layout) -> str:
        try:
            check_llama_layer(self.decoder, layout, self.seq_length)
        except ConfigError as error:
            return str(error)
        return ""

    def layer_rows(self, layout: Layout, recompute: str, device_type: str = "cuda") -> list[Row]:
        return llama_layer_rows(self.decoder, layout, self.seq_length, recompute, self.routing or "even")

    def first_rows(self, layout: Layout) -> list[Row]:
        return [Row("token ids", 4 * own_tokens(layout, self.seq_length), 1, "embedding")]

    def last_rows(self, layout: Layout, device_type: str = "cuda") -> list[Row]:
        tokens, t = own_tokens(layout, self.seq_length), layout.tensor_parallel_size
        whole = t if layout.sequence_parallel else 1
        hidden = 2 * tokens * self.width // whole
        return [
            Row("final RMSNorm input", hidden, whole, "residual stream"),
            Row("final RMSNorm statistic", 4 * tokens // whole, whole, "1/rms of each token"),
            Row("output layer input", hidden, whole, "weight gradient"),
            Row("logits (float32)", 4 * tokens * self._own_vocabulary(layout), t, "cross entropy"),
            Row("target ids", 4 * tokens, 1, "cross entropy"),
        ]

    def layer_parameters(self, layout: Layout) -> int:
        d, t = self.decoder, layout.tensor_parallel_size
        own_heads = d.query_size // t + own_key_value_size(d, layout)
        shared = 2 * d.hidden_size * (own_heads + 1) + 2 * d.head_size * d.qk_norm
        if d.num_experts:
            return shared + d.num_experts * d.hidden_size + d.num_experts // t * d.mlp_weights
        return shared + d.mlp_weights // t

    def end_parameters(self, layout: Layout, first: bool, last: bool) -> int:
        tables = 1 if self.decoder.tied_embeddings and (first or last) else first + last
        return tables * self._own_vocabulary(layout) * self.width + self.width * last

    def embedding_backward(self, layout: Layout, last: bool, device_type: str = "cuda") -> list[Row]:
        tied = last and self.decoder.tied_embeddings
        return self._backward(layout, "none").embedding(self.first_rows(layout), last, tied).transient_rows()

    def last_layer_backward(
        self, layout: Layout, recompute: str, first: bool, last: bool, device_type: str = "cuda"
    ) -> list[Row]:
        """Exact, but for an estimate: K and V gathered among context-parallel ranks."""
        ends = self.last_rows(layout, device_type) if last else []
        layer = self.layer_rows(layout, recompute)
        tied = first and last and self.decoder.tied_embeddings
        rows = self._backward(layout, recompute).last_layer(layer, ends, tied).transient_rows()
        if layout.context_parallel_size > 1:
            size = 2 * 2 * self.seq_length * layout.micro_batch_size * own_key_value_size(self.decoder, layout)
            rows.append(Row("K and V, gathered", size, 1, "context parallelism"))
        return rows

    def transient_rows(
        self, layout: Layout, recompute: str, first: bool, last: bool, layers: int, device_type: str = "cuda"
    ) -> list[Row]:
        rows = self.last_layer_backward(layout, recompute, first, last, device_type)
        if not first:
            return rows
        held = layers * total(self.layer_rows(layout, recompute)) + (total(self.last_rows(layout)) if last else 0)
        gone = Row("layers, freed by then", -held, source="backward is done with them")
        return max(rows, [*self.embedding_backward(layout, last, device_type), gone], key=total)

    def part(self, layout: Layout, what: str, device_type: str = "cuda") -> StagePart:
        raise ConfigError("plan", f"{self.name} is replayed")

    def moved_bytes(self, layout: Layout) -> int:
        return self.layer_work(layout).moved_bytes

    def moved_again_bytes(self, layout: Layout, recompute: str) -> int:
        return self.added_work(layout, recompute).moved_bytes

    def moved_in_end_bytes(self, layout: Layout) -> int:
        return self.last_work(layout).moved_bytes

    def _backward(self, layout: Layout, recompute: str) -> LlamaBackward:
        shape = own_llama_shape(self.decoder, layout, self.seq_length)
        routed = self._routed(layout) or 0
        return LlamaBackward(shape, layout.within_layer, self._own_vocabulary(layout), recompute, routed)

    def with_sequence(self, seq_length: int) -> PlannedModel:
        longer = copy(self)
        longer.seq_length = check_size("seq_length", seq_length)
        return longer

    def sizes(self) -> dict[str, int]:
        names = (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "num_experts",
            "experts_per_token",
        )
        return {name: size for name in names if (size := getattr(self.decoder, name)) is not None}

    @property
    def num_parameters(self) -> int:
        layout = Layout(sequence_parallel=False)
        return self.num_layers * self.layer_parameters(layout) + self.end_parameters(layout, True, True)
