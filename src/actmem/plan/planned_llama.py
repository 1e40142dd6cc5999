"""Today's decoder for the planner: Llama and its kin."""

from __future__ import annotations

from actmem.checks import ConfigError, check_size
from actmem.config import ModelShape, padded_vocab_size
from actmem.formulas.communication import Exchange, layer_exchanges
from actmem.plan.decoder import Decoder
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
from actmem.plan.planned_model import CONTEXT_EXCHANGE, PlannedModel, RankWork
from actmem.recipes import Recompute
from actmem.rows import Row


class PlannedLlama(PlannedModel):
    """decoder: its sizes.  seq_length: the model's own, unless ``with_sequence`` changes it."""

    recompute_modes = LLAMA_MODES
    context_parallel = True

    def __init__(self, name: str, decoder: Decoder, seq_length: int):
        self.name, self.decoder = name, decoder
        self.num_layers, self.seq_length = decoder.num_layers, check_size("seq_length", seq_length)

    def refusal(self, layout: Layout) -> str:
        try:
            check_llama_layer(self.decoder, layout, self.seq_length)
        except ConfigError as error:
            return str(error)
        return ""

    def layer_rows(self, layout: Layout, recompute: str, device_type: str = "cuda") -> list[Row]:
        return llama_layer_rows(self.decoder, layout, self.seq_length, recompute)

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

    def _own_vocabulary(self, layout: Layout) -> int:
        t = layout.tensor_parallel_size
        return padded_vocab_size(self.decoder.vocab_size, t, multiple=1) // t

    def layer_parameters(self, layout: Layout) -> tuple[int, int]:
        d, t = self.decoder, layout.tensor_parallel_size
        matrices = (2 * d.hidden_size * d.query_size + 3 * d.hidden_size * d.ffn_hidden_size) // t
        keys = 2 * d.hidden_size * own_key_value_size(d, layout)
        return matrices + keys + 2 * d.hidden_size + 2 * d.head_size * d.qk_norm, 0

    def end_parameters(self, layout: Layout, first: bool, last: bool) -> int:
        tables = 1 if self.decoder.tied_embeddings and (first or last) else first + last
        return tables * self._own_vocabulary(layout) * self.width + self.width * last

    def layer_work(self, layout: Layout) -> RankWork:
        linears, attention = self._products(layout)
        return RankWork(linears + attention, self._moved(layout) + self._operands(layout))

    def _products(self, layout: Layout) -> tuple[int, int]:
        """FLOPs of the linears, and of attention, which skips what the causal mask hides."""
        d, t, tokens = self.decoder, layout.tensor_parallel_size, own_tokens(layout, self.seq_length)
        return 2 * tokens * d.layer_weights // t, 2 * tokens * self.seq_length * d.query_size // t

    def _operands(self, layout: Layout) -> int:
        """Bytes that the linears and flash attention read and write."""
        d, t, tokens = self.decoder, layout.tensor_parallel_size, own_tokens(layout, self.seq_length)
        query, key, wide = d.query_size // t, own_key_value_size(d, layout), d.ffn_hidden_size // t
        elements = 4 * d.hidden_size + 2 * query + 2 * key + 3 * wide + 2 * (query + key)
        return 2 * (tokens * elements + self.layer_parameters(layout)[0])

    def _moved(self, layout: Layout) -> int:
        """Bytes of norms, rotation, SwiGLU and sums, each alone."""
        d, t, tokens = self.decoder, layout.tensor_parallel_size, own_tokens(layout, self.seq_length)
        hidden = tokens * d.hidden_size // (t if layout.sequence_parallel else 1)
        turned = tokens * (d.query_size // t + own_key_value_size(d, layout)) * (1 + d.qk_norm)
        return 2 * (2 * 2 * hidden + 2 * 3 * hidden + 2 * turned + 3 * tokens * d.ffn_hidden_size // t)

    def added_work(self, layout: Layout, recompute: str) -> RankWork:
        d, t, tokens = self.decoder, layout.tensor_parallel_size, own_tokens(layout, self.seq_length)
        if recompute == "none":
            return RankWork()
        if Recompute.of(recompute).region == "terms":
            hidden = tokens * d.hidden_size // (t if layout.sequence_parallel else 1)
            heads = tokens * (d.query_size // t + own_key_value_size(d, layout)) if d.qk_norm else 0
            return RankWork(0, 2 * (2 * 2 * hidden + 3 * tokens * d.ffn_hidden_size // t + 2 * 2 * heads))
        # Backward doesn't read the output of the last product, down: the second run stops before it.
        work, down = self.layer_work(layout), 2 * tokens * d.hidden_size * d.ffn_hidden_size // t
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

    def _backward(self, layout: Layout, recompute: str) -> LlamaBackward:
        shape = own_llama_shape(self.decoder, layout, self.seq_length)
        return LlamaBackward(shape, layout.within_layer, self._own_vocabulary(layout), recompute)

    def model_flops(self, global_batch_size: int) -> int:
        layout = Layout(micro_batch_size=global_batch_size, sequence_parallel=False)
        head = 2 * own_tokens(layout, self.seq_length) * self.width * self.decoder.vocab_size
        return 3 * (self.num_layers * sum(self._products(layout)) + head)

    def with_sequence(self, seq_length: int) -> PlannedModel:
        return PlannedLlama(self.name, self.decoder, seq_length).with_modes(self.recompute_modes)

    def sizes(self) -> dict[str, int]:
        names = (
            "num_layers",
            "hidden_size",
            "ffn_hidden_size",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
        )
        return {name: getattr(self.decoder, name) for name in names}

    @property
    def num_parameters(self) -> int:
        layout = Layout(sequence_parallel=False)
        return self.num_layers * self.layer_parameters(layout)[0] + self.end_parameters(layout, True, True)

    @property
    def width(self) -> int:
        return self.decoder.hidden_size
