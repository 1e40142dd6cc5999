"""The paper's GPT for the planner: its own formulas, asked for one layout after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from actmem.checks import ConfigError
from actmem.config import ModelShape, check_layer, check_vocab_size
from actmem.formulas.activations import layer_rows
from actmem.formulas.communication import Exchange, layer_exchanges
from actmem.formulas.extras import layer_extra_rows
from actmem.formulas.flops import eq7, forward_products, recomputed_products
from actmem.formulas.roofline import forward_operations
from actmem.formulas.stage_terms import stage_extra_rows, stage_rows
from actmem.formulas.states import num_parameters, parameter_counts
from actmem.plan.layout import Layout
from actmem.plan.planned_model import PlannedModel, RankWork
from actmem.recipes import PAPER_LAYER, Recompute
from actmem.rows import Row, total

#: Operations that aren't matrix products, by the modes that run them again; *full* runs all but the last.
_CORE = ("softmax", "softmax dropout")
_ELEMENTWISE = ("layer norm 1", "layer norm 2", "GeLU")

#: Terms by where backward is done with them.
_IN_MLP = ("h→4h input", "GeLU input", "4h→h input", "MLP dropout mask")
_AFTER_CORE = (*_IN_MLP, "attention projection input", "layer-norm 2 input", "layer-norm 2 statistics")


class PlannedGPT(PlannedModel):
    """shape: its micro_batch_size is not used.  Modes run to the last tensor that backward reads."""

    recompute_modes: Sequence[str] = ("none", "selective", "elementwise", "full")

    def __init__(self, name: str, shape: ModelShape):
        self.name, self.shape = name, shape
        self.num_layers, self.seq_length = shape.num_layers, shape.seq_length
        # Asked again and again for layouts that differ in other axes.
        self._shape = cache(lambda b: shape.with_sizes(micro_batch_size=b, num_layers=1))
        self._weights = cache(self._elements_of_layer)

    def _one_layer(self, layout: Layout) -> tuple:
        """The shape with one layer, and t with sequence parallelism: what one layer's formulas take."""
        return self._shape(layout.micro_batch_size), layout.within_layer

    def refusal(self, layout: Layout) -> str:
        if layout.context_parallel_size > 1:
            return "context parallelism: this layer has none"
        try:
            check_layer(*self._one_layer(layout))
            check_vocab_size(self.shape.vocab_size, layout.tensor_parallel_size)
        except ConfigError as error:
            return str(error)
        return ""

    def layer_rows(self, layout: Layout, recompute: str, device_type: str = "cuda") -> list[Row]:
        shape, parallel = self._one_layer(layout)
        rows = layer_rows(shape, parallel, recompute)
        # The model makes one causal mask for all layers.
        extras = layer_extra_rows(shape, parallel, recompute, device_type=device_type)
        return rows + [row for row in extras if row.term != "causal mask"]

    def _ends(self, layout: Layout, device_type: str) -> list[Row]:
        # One stage, one layer, one microbatch: all that isn't the layer's is the ends'.
        shape, parallel = self._one_layer(layout)
        of_layer = {row.term for row in self.layer_rows(layout, "none", device_type)}
        rows = stage_rows(shape, parallel) + stage_extra_rows(shape, parallel, device_type=device_type)
        return [row for row in rows if row.term not in of_layer]

    def first_rows(self, layout: Layout) -> list[Row]:
        return [row for row in self._ends(layout, "cuda") if row.term in ("embedding dropout mask", "token ids")]

    def last_rows(self, layout: Layout, device_type: str = "cuda") -> list[Row]:
        first = {row.term for row in self.first_rows(layout)}
        return [row for row in self._ends(layout, device_type) if row.term not in first]

    def layer_parameters(self, layout: Layout) -> tuple[int, int]:
        return self._weights(layout.tensor_parallel_size), 0

    def _elements_of_layer(self, tensor_parallel_size: int) -> int:
        layout = Layout(tensor_parallel_size=tensor_parallel_size)
        counts = parameter_counts(*self._one_layer(layout))
        return sum(counts.values()) - self.end_parameters(layout, True, True)

    def end_parameters(self, layout: Layout, first: bool, last: bool) -> int:
        h, v, t = self.shape.hidden_size, self.shape.vocab_size, layout.tensor_parallel_size
        table = v * h // t if first or last else 0
        return table + (self.seq_length * h if first else 0) + (2 * h if last else 0)

    def layer_work(self, layout: Layout) -> RankWork:
        shape, parallel = self._one_layer(layout)
        operations = forward_operations(shape, parallel)
        flops = sum(operation.flops for operation in operations if operation.product)
        return RankWork(flops, sum(operation.bytes for operation in operations))

    def added_work(self, layout: Layout, recompute: str) -> RankWork:
        shape, parallel = self._one_layer(layout)
        flops = sum(p.flops for p in recomputed_products(shape, layout.micro_batch_size, recompute))
        operations = forward_operations(shape, parallel)
        # The second run stops before the region's last product, whose output backward doesn't read, and so
        # before the last dropout of the layer.
        products = PAPER_LAYER.products_again(recompute)
        names = {"none": (), "selective": _CORE, "elementwise": _CORE + _ELEMENTWISE}.get(recompute)
        again = [o for o in operations if (o.name in products if o.product else names is None or o.name in names)]
        again = [o for o in again if o.name != operations[-1].name]
        return RankWork(flops // layout.tensor_parallel_size, sum(o.bytes for o in again))

    def last_work(self, layout: Layout) -> RankWork:
        shape, t = self._shape(layout.micro_batch_size), layout.tensor_parallel_size
        products = forward_products(shape, layout.micro_batch_size)
        flops = next(p.flops for p in products if p.term == "logits")
        # The loss reads 16-bit logits and passes over its float32 copy four times: made, shifted, exp, divided.
        logits = self.seq_length * layout.micro_batch_size * self.shape.vocab_size // t
        return RankWork(flops // t, (2 + 4 + 3 * 8) * logits)

    def layer_exchanges(self, layout: Layout, recompute: str) -> list[Exchange]:
        shape, parallel = self._one_layer(layout)
        return layer_exchanges(shape, parallel, recompute)

    def transient_rows(self, layout: Layout, recompute: str, last: bool, device_type: str = "cuda") -> list[Row]:
        """The fuller of two moments in the last layer's backward: in the MLP, and where the scores' gradient is made.

        On the last rank the loss's backward too, while the logits are still there.  An estimate: what
        kernels and autograd hold for a moment differs from version to version.
        """
        moments = [self._in_mlp(layout, recompute, device_type), self._in_attention(layout, recompute, device_type)]
        if last:
            gone = -sum(row.bytes for row in self.last_rows(layout, device_type))
            moments = [[*rows, Row("logits and loss, freed by then", gone)] for rows in moments]
            t = layout.tensor_parallel_size
            size = 2 * self.seq_length * layout.micro_batch_size * self.shape.vocab_size // t
            moments.append([Row("logits, 16-bit, or their gradient", size, t, "cross entropy")])
        return max(moments, key=total)

    def _in_mlp(self, layout: Layout, recompute: str, device_type: str) -> list[Row]:
        t, sbh = layout.tensor_parallel_size, self._whole_bytes(layout)
        again = self.recomputed_rows(layout, recompute, device_type)
        if Recompute.of(recompute).region != "layer":  # terms are made again when backward comes to them
            again = [row for row in again if row.term in _IN_MLP]
        return again + [
            Row("output gradient, gathered", sbh, 1, "backward of ḡ"),
            Row("gradients of GeLU's output and input", 2 * 4 * sbh // t, t, "backward of GeLU"),
            Row("weight gradient of 4h→h", 2 * 4 * self.shape.hidden_size**2 // t, t, "16-bit, before it is added"),
        ]

    def _in_attention(self, layout: Layout, recompute: str, device_type: str) -> list[Row]:
        shape, t = self.shape, layout.tensor_parallel_size
        cut = t if layout.sequence_parallel else 1
        kept = self.layer_rows(layout, recompute, device_type)
        again = [row for row in self.recomputed_rows(layout, recompute, device_type) if row.term not in _AFTER_CORE]
        scores = 2 * shape.num_attention_heads * self.seq_length**2 * layout.micro_batch_size // t
        return again + [
            Row("gradient of the scores", scores, t, "backward of attention over V"),
            Row("gradients of the context and of V", 2 * self._whole_bytes(layout) // t, t, "attention"),
            Row("gradient of the residual stream", self._whole_bytes(layout) // cut, cut, "sum"),
            Row("what follows attention, freed by then", -sum(r.bytes for r in kept if r.term in _AFTER_CORE), t),
        ]

    def _whole_bytes(self, layout: Layout) -> int:
        """2sbh."""
        return 2 * self.seq_length * layout.micro_batch_size * self.shape.hidden_size

    def model_flops(self, global_batch_size: int) -> int:
        return eq7(self.shape, global_batch_size)

    def with_sequence(self, seq_length: int) -> PlannedModel:
        return PlannedGPT(self.name, self.shape.with_sizes(seq_length=seq_length)).with_modes(self.recompute_modes)

    def sizes(self) -> dict[str, int]:
        names = ("num_layers", "hidden_size", "num_attention_heads", "vocab_size")
        return {name: getattr(self.shape, name) for name in names} | {"ffn_hidden_size": 4 * self.shape.hidden_size}

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.shape)

    @property
    def width(self) -> int:
        return self.shape.hidden_size
