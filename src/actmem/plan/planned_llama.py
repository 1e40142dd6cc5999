"""Today's decoder for the planner: Llama and its kin, with experts too, which the ranks of t share.

Context parallelism cuts everything along the sequence: K and V are gathered for attention, and again
in backward.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import lru_cache

from actmem.checks import ConfigError, check_choice, check_size
from actmem.config import ModelShape, padded_vocab_size
from actmem.formulas.communication import Exchange, layer_exchanges
from actmem.formulas.llama_terms import FLOAT32, forced_routed_tokens, llama_rows
from actmem.llama_shape import LlamaShape, own_context_shape
from actmem.plan.decoder import Decoder
from actmem.plan.layout import Layout
from actmem.plan.planned_model import CONTEXT_EXCHANGE, EXPERT_EXCHANGE, PlannedModel, shared_by
from actmem.recipes import Recompute
from actmem.rows import Row
from actmem.tape.stage_tapes import StagePart, stage_part


#: A search asks the same of thousands of layouts.
@lru_cache(maxsize=2**14)
def own_llama_shape(decoder: Decoder, layout: Layout, seq_length: int) -> LlamaShape:
    """One layer as a context-parallel rank sees it: its part of the sequence.

    Raises ConfigError if the ranks can't share the layer, or the sequence in two chunks each (``layers.context``).
    """
    d = decoder
    shape = LlamaShape(
        seq_length, layout.micro_batch_size, d.hidden_size, d.num_attention_heads, d.num_key_value_heads,
        d.ffn_hidden_size, d.head_size, d.qk_norm, num_experts=d.num_experts, experts_per_token=d.experts_per_token,
    )  # fmt: skip
    return own_context_shape(shape, layout.within_layer, layout.context_parallel_size)


class PlannedLlama(PlannedModel):
    """decoder: its sizes.  seq_length: the model's own, unless ``with_sequence`` changes it.  routing: of experts, see ``with_routing``."""

    recompute_modes = ("none", "elementwise", "full")
    context_parallel = True

    def __init__(self, name: str, decoder: Decoder, seq_length: int):
        self.name, self.decoder = name, decoder
        self.num_layers, self.seq_length = decoder.num_layers, check_size("seq_length", seq_length)
        self.routing = "even" if decoder.num_experts else ""

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
            self._shape(layout)
        except ConfigError as error:
            return str(error)
        return ""

    def layer_rows(self, layout: Layout, recompute: str, device_type: str = "cuda") -> list[Row]:
        check_choice("recompute", recompute, ("none", "elementwise", "full"))
        return llama_rows(self._shape(layout), layout.within_layer, recompute, routed_tokens=self._routed(layout))

    def first_rows(self, layout: Layout) -> list[Row]:
        return [Row("token ids", 4 * self._tokens(layout), 1, "embedding")]

    def last_rows(self, layout: Layout, device_type: str = "cuda") -> list[Row]:
        tokens, t = self._tokens(layout), layout.tensor_parallel_size
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
        own_heads = d.query_size // t + self._key_value_size(layout)
        shared = 2 * d.hidden_size * (own_heads + 1) + 2 * d.head_size * d.qk_norm
        if d.num_experts:
            return shared + d.num_experts * d.hidden_size + d.num_experts // t * d.mlp_weights
        return shared + d.mlp_weights // t

    def end_parameters(self, layout: Layout, first: bool, last: bool) -> int:
        tables = 1 if self.decoder.tied_embeddings and (first or last) else first + last
        return tables * self._own_vocabulary(layout) * self.width + self.width * last

    def part(self, layout: Layout, what: str, device_type: str = "cuda") -> StagePart:
        d, t, c = self.decoder, layout.tensor_parallel_size, layout.context_parallel_size
        if what == "whole" and d.tied_embeddings:
            raise ConfigError("plan", f"no stage of {self.name} with tied embeddings has been recorded")
        experts = d.num_experts is not None
        sizes = (
            *(self.seq_length // c, layout.micro_batch_size, d.hidden_size, d.num_attention_heads // t),
            *(self._key_value_size(layout) // d.head_size, d.head_size, d.ffn_hidden_size // (1 if experts else t)),
            *(self._own_vocabulary(layout), t, c),
        )
        name = f"{what} {shared_by(layout)}"
        if not what.startswith("layer"):
            return stage_part("llama", name, sizes)
        name += f"{' context' * (c > 1)}{' qk' * d.qk_norm}"
        if not experts:
            return stage_part("llama", name, sizes)
        routed = self._routed(layout) or 0
        counts = (d.num_experts or 0) // t, d.experts_per_token or 0, routed
        return stage_part("experts", f"{name} experts", (*sizes, *counts))

    def with_sequence(self, seq_length: int) -> PlannedModel:
        longer = copy(self)
        longer.seq_length = check_size("seq_length", seq_length)
        return longer

    def sizes(self) -> dict[str, int]:
        of_layer = ("hidden_size", "ffn_hidden_size", "num_attention_heads", "num_key_value_heads")
        names = ("num_layers", *of_layer, "vocab_size", "num_experts", "experts_per_token")
        return {name: size for name in names if (size := getattr(self.decoder, name)) is not None}

    @property
    def width(self) -> int:
        return self.decoder.hidden_size

    @property
    def num_parameters(self) -> int:
        layout = Layout(sequence_parallel=False)
        return self.num_layers * self.layer_parameters(layout) + self.end_parameters(layout, True, True)

    def _shape(self, layout: Layout) -> LlamaShape:
        return own_llama_shape(self.decoder, layout, self.seq_length)

    def _tokens(self, layout: Layout) -> int:
        """Tokens of one microbatch on a context-parallel rank."""
        return self.seq_length // layout.context_parallel_size * layout.micro_batch_size

    def _key_value_size(self, layout: Layout) -> int:
        """Elements of one rank's keys for one token: kd/t, but at least one head."""
        return max(self.decoder.num_key_value_heads // layout.tensor_parallel_size, 1) * self.decoder.head_size

    def _routed(self, layout: Layout) -> int | None:
        """Pairs of a token and an expert on rank 0, which takes most (R); None without experts."""
        return forced_routed_tokens(self._shape(layout), layout.within_layer, self.routing, 0) if self.routing else None

    def _own_vocabulary(self, layout: Layout) -> int:
        t = layout.tensor_parallel_size
        return padded_vocab_size(self.decoder.vocab_size, t, multiple=1) // t

    def _mlp_rows(self, layout: Layout) -> int:
        """Elements of gate, as of up: of this rank's columns for every token, or of its experts for the tokens that they take."""
        d, routed = self.decoder, self._routed(layout)
        if routed is not None:
            return routed * d.ffn_hidden_size
        return self._tokens(layout) * d.ffn_hidden_size // layout.tensor_parallel_size

    def _normed(self, layout: Layout) -> int:
        """Elements of a norm's input on this rank."""
        cut = layout.tensor_parallel_size if layout.sequence_parallel else 1
        return self._tokens(layout) * self.width // cut

    def moved_bytes(self, layout: Layout) -> int:
        return self._moved(layout) + self._operands(layout)

    def _operands(self, layout: Layout) -> int:
        """Bytes that the linears and flash attention read and write."""
        d, t, tokens = self.decoder, layout.tensor_parallel_size, self._tokens(layout)
        query, key = d.query_size // t, self._key_value_size(layout)
        elements = tokens * (2 * d.hidden_size + 2 * query + 2 * key + 2 * (query + key))
        routed = self._routed(layout)
        # In and out of the MLP; of experts, the rows that they take, and the router's input.
        elements += 2 * d.hidden_size * tokens if routed is None else 2 * d.hidden_size * routed + self._normed(layout)
        return 2 * (elements + 3 * self._mlp_rows(layout) + self.layer_parameters(layout))

    def _moved(self, layout: Layout) -> int:
        """Bytes of norms, rotation, SwiGLU, dispatch and sums, each alone."""
        d, t, tokens = self.decoder, layout.tensor_parallel_size, self._tokens(layout)
        hidden = self._normed(layout)
        turned = tokens * (d.query_size // t + self._key_value_size(layout)) * (1 + d.qk_norm)
        moved = 2 * (2 * 2 * hidden + 2 * 3 * hidden + 2 * turned + 3 * self._mlp_rows(layout))
        if routed := self._routed(layout):
            # A row for each pair is written, sorted, sent, sorted back and added up.
            pairs = hidden * (d.experts_per_token or 0)
            moved += 2 * (2 * hidden + 6 * pairs + 4 * routed * self.width)
        return moved

    def moved_again_bytes(self, layout: Layout, recompute: str) -> int:
        d, t, tokens = self.decoder, layout.tensor_parallel_size, self._tokens(layout)
        if recompute == "none":
            return 0
        if Recompute.of(recompute).region == "terms":
            heads = tokens * (d.query_size // t + self._key_value_size(layout)) if d.qk_norm else 0
            return 2 * (2 * 2 * self._normed(layout) + 3 * self._mlp_rows(layout) + 2 * 2 * heads)
        return self.moved_bytes(layout)

    def moved_in_end_bytes(self, layout: Layout) -> int:
        tokens, own = self._tokens(layout), self._own_vocabulary(layout)
        # The loss reads 16-bit logits and passes over its float32 copy four times: made, shifted, exp, divided.
        return (2 + 4 + 3 * 8) * tokens * own + 2 * (tokens * (self.width + own) + self.width * own)

    def layer_exchanges(self, layout: Layout, recompute: str) -> list[Exchange]:
        again, mode = (2, "full") if Recompute.of(recompute).region == "layer" else (1, "none")
        cp, d = layout.context_parallel_size, self.decoder
        shape = ModelShape(
            self.seq_length // cp, layout.micro_batch_size, d.hidden_size, d.num_attention_heads, vocab_size=1
        )
        rows = layer_exchanges(shape, layout.within_layer, mode)
        if d.num_experts and layout.tensor_parallel_size > 1:
            rows = self._with_experts(rows, layout, recompute)
        if cp > 1:
            size = 2 * 2 * self.seq_length * layout.micro_batch_size * self._key_value_size(layout)
            rows += [
                Exchange("all-gather", "forward", f"{CONTEXT_EXCHANGE}, gathered", cp, size, again),
                Exchange("all-gather", "backward", f"{CONTEXT_EXCHANGE}, gathered again", cp, size),
                Exchange("reduce-scatter", "backward", f"{CONTEXT_EXCHANGE}, gradients", cp, size),
            ]
        return rows

    def _with_experts(self, rows: list[Exchange], layout: Layout, recompute: str) -> list[Exchange]:
        """With the experts' all-to-alls in place of the MLP's exchanges; where every rank has every token, with one more sum."""
        d, t = self.decoder, layout.tensor_parallel_size
        pairs = self._normed(layout) // self.width * (d.experts_per_token or 0)
        if not layout.sequence_parallel:
            return [*rows, Exchange("all-reduce", "backward", f"{EXPERT_EXCHANGE}, weights", t, FLOAT32 * pairs)]
        region = Recompute.of(recompute).region
        kinds = [
            ("rows", 2 * self.width * pairs, {"forward": 2, "recompute": int(region == "layer"), "backward": 3}),
            ("weights", FLOAT32 * pairs, {"forward": 1, "recompute": int(region != "none"), "backward": 1}),
        ]
        of_attention = [replace(each, where=each.where.replace(" and MLP", ""), count=1) for each in rows]
        return of_attention + [
            Exchange("all-to-all", phase, f"{EXPERT_EXCHANGE}, {what}", t, size, count)
            for what, size, counts in kinds
            for phase, count in counts.items()
            if count
        ]

    def model_flops(self, global_batch_size: int) -> int:
        layout = Layout(micro_batch_size=global_batch_size, sequence_parallel=False)
        layer, end = (self.part(layout, what).forward_flops for what in ("layer none", "last"))
        return 3 * (self.num_layers * layer + end)
