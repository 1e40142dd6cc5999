"""What today's decoder computes, moves and sends on one rank: FLOPs and bytes of one microbatch."""

from __future__ import annotations

from dataclasses import replace

from actmem.checks import check_size
from actmem.config import ModelShape, padded_vocab_size
from actmem.formulas.communication import Exchange, layer_exchanges
from actmem.formulas.llama_terms import FLOAT32
from actmem.plan.decoder import Decoder
from actmem.plan.layout import Layout
from actmem.plan.llama_rows import own_key_value_size, own_routed_tokens, own_tokens
from actmem.plan.planned_model import CONTEXT_EXCHANGE, EXPERT_EXCHANGE, PlannedModel, RankWork
from actmem.recipes import Recompute


class LlamaWork(PlannedModel):
    """The half of ``PlannedLlama`` that its time rests on."""

    def __init__(self, name: str, decoder: Decoder, seq_length: int):
        self.name, self.decoder = name, decoder
        self.num_layers, self.seq_length = decoder.num_layers, check_size("seq_length", seq_length)
        self.routing = "even" if decoder.num_experts else ""

    def _routed(self, layout: Layout) -> int | None:
        return own_routed_tokens(self.decoder, layout, self.seq_length, self.routing or "even")

    def _own_vocabulary(self, layout: Layout) -> int:
        t = layout.tensor_parallel_size
        return padded_vocab_size(self.decoder.vocab_size, t, multiple=1) // t

    def layer_work(self, layout: Layout) -> RankWork:
        linears, attention = self._products(layout)
        return RankWork(linears + attention, self._moved(layout) + self._operands(layout))

    def _products(self, layout: Layout) -> tuple[int, int]:
        """FLOPs of the linears, and of attention, which skips what the causal mask hides."""
        d, t, tokens = self.decoder, layout.tensor_parallel_size, own_tokens(layout, self.seq_length)
        linears = (
            2 * tokens * d.attention_weights // t + 2 * self._mlp_rows(layout) * d.mlp_weights // d.ffn_hidden_size
        )
        if d.num_experts:
            linears += 2 * self._normed(layout) * d.num_experts
        return linears, 2 * tokens * self.seq_length * d.query_size // t

    def _mlp_rows(self, layout: Layout) -> int:
        """Elements of gate, as of up: of this rank's columns for every token, or of its experts for the tokens that they take."""
        d, routed = self.decoder, self._routed(layout)
        if routed is not None:
            return routed * d.ffn_hidden_size
        return own_tokens(layout, self.seq_length) * d.ffn_hidden_size // layout.tensor_parallel_size

    def _normed(self, layout: Layout) -> int:
        """Elements of a norm's input on this rank."""
        cut = layout.tensor_parallel_size if layout.sequence_parallel else 1
        return own_tokens(layout, self.seq_length) * self.width // cut

    def _operands(self, layout: Layout) -> int:
        """Bytes that the linears and flash attention read and write."""
        d, t, tokens = self.decoder, layout.tensor_parallel_size, own_tokens(layout, self.seq_length)
        query, key = d.query_size // t, own_key_value_size(d, layout)
        elements = tokens * (2 * d.hidden_size + 2 * query + 2 * key + 2 * (query + key))
        routed = self._routed(layout)
        # In and out of the MLP; of experts, the rows that they take, and the router's input.
        elements += 2 * d.hidden_size * tokens if routed is None else 2 * d.hidden_size * routed + self._normed(layout)
        return 2 * (elements + 3 * self._mlp_rows(layout) + self.layer_parameters(layout))

    def _moved(self, layout: Layout) -> int:
        """Bytes of norms, rotation, SwiGLU, dispatch and sums, each alone."""
        d, t, tokens = self.decoder, layout.tensor_parallel_size, own_tokens(layout, self.seq_length)
        hidden = self._normed(layout)
        turned = tokens * (d.query_size // t + own_key_value_size(d, layout)) * (1 + d.qk_norm)
        moved = 2 * (2 * 2 * hidden + 2 * 3 * hidden + 2 * turned + 3 * self._mlp_rows(layout))
        if routed := self._routed(layout):
            # A row for each pair is written, sorted, sent, sorted back and added up.
            pairs = hidden * (d.experts_per_token or 0)
            moved += 2 * (2 * hidden + 6 * pairs + 4 * routed * self.width)
        return moved

    def added_work(self, layout: Layout, recompute: str) -> RankWork:
        d, t, tokens = self.decoder, layout.tensor_parallel_size, own_tokens(layout, self.seq_length)
        if recompute == "none":
            return RankWork()
        if Recompute.of(recompute).region == "terms":
            heads = tokens * (d.query_size // t + own_key_value_size(d, layout)) if d.qk_norm else 0
            return RankWork(0, 2 * (2 * 2 * self._normed(layout) + 3 * self._mlp_rows(layout) + 2 * 2 * heads))
        # Backward doesn't read the output of the last product, down: the second run stops before it.
        work, down = self.layer_work(layout), 2 * self._mlp_rows(layout) * self.width
        return RankWork(work.product_flops - down, work.moved_bytes)

    def last_work(self, layout: Layout) -> RankWork:
        tokens, own = own_tokens(layout, self.seq_length), self._own_vocabulary(layout)
        # The loss reads 16-bit logits and passes over its float32 copy four times: made, shifted, exp, divided.
        moved = (2 + 4 + 3 * 8) * tokens * own + 2 * (tokens * (self.width + own) + self.width * own)
        return RankWork(2 * tokens * self.width * own, moved)

    def layer_exchanges(self, layout: Layout, recompute: str) -> list[Exchange]:
        mode = "full" if Recompute.of(recompute).region == "layer" else "none"
        cp, d = layout.context_parallel_size, self.decoder
        shape = ModelShape(
            self.seq_length // cp, layout.micro_batch_size, d.hidden_size, d.num_attention_heads, vocab_size=1
        )
        rows = layer_exchanges(shape, layout.within_layer, mode)
        if d.num_experts and layout.tensor_parallel_size > 1:
            rows = self._with_experts(rows, layout, recompute)
        if cp > 1:
            size = 2 * 2 * self.seq_length * layout.micro_batch_size * own_key_value_size(d, layout)
            rows += [
                Exchange(
                    "all-gather",
                    "forward",
                    f"{CONTEXT_EXCHANGE}, gathered",
                    cp,
                    size,
                    2 if Recompute.of(mode).region == "layer" else 1,
                ),
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
        head = 2 * own_tokens(layout, self.seq_length) * self.width * self.decoder.vocab_size
        return 3 * (self.num_layers * sum(self._products(layout)) + head)

    @property
    def width(self) -> int:
        return self.decoder.hidden_size
