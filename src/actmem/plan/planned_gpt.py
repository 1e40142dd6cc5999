"""The paper's GPT for the planner: its own formulas, asked for one layout after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from actmem.checks import ConfigError
from actmem.config import ModelShape, check_layer, check_vocab_size
from actmem.formulas.activations import layer_extra_rows, layer_rows
from actmem.formulas.communication import Exchange, layer_exchanges
from actmem.formulas.flops import eq7, forward_operations
from actmem.formulas.stage_terms import stage_extra_rows, stage_rows
from actmem.formulas.states import num_parameters, parameter_counts
from actmem.plan.layout import Layout
from actmem.plan.planned_model import PlannedModel, shared_by
from actmem.recipes import PAPER_LAYER
from actmem.rows import Row
from actmem.tape.stage_tapes import StagePart, stage_part

#: Operations that aren't matrix products, by the modes that run them again; *full* runs all but the last.
_CORE = ("softmax", "softmax dropout")
_ELEMENTWISE = ("layer norm 1", "layer norm 2", "GeLU")


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

    def layer_parameters(self, layout: Layout) -> int:
        return self._weights(layout.tensor_parallel_size)

    def _elements_of_layer(self, tensor_parallel_size: int) -> int:
        layout = Layout(tensor_parallel_size=tensor_parallel_size)
        counts = parameter_counts(*self._one_layer(layout))
        return sum(counts.values()) - self.end_parameters(layout, True, True)

    def end_parameters(self, layout: Layout, first: bool, last: bool) -> int:
        h, v, t = self.shape.hidden_size, self.shape.vocab_size, layout.tensor_parallel_size
        table = v * h // t if first or last else 0
        return table + (self.seq_length * h if first else 0) + (2 * h if last else 0)

    def part(self, layout: Layout, what: str, device_type: str = "cuda") -> StagePart:
        a, b, h, s = self._shape(layout.micro_batch_size).letters()
        t = layout.tensor_parallel_size
        name = f"{what} {shared_by(layout)}{' cuda' if device_type == 'cuda' else ''}"
        return stage_part("gpt", name, (s, b, a // t, h // a, self.shape.vocab_size // t, t))

    def moved_bytes(self, layout: Layout) -> int:
        return sum(operation.bytes for operation in forward_operations(*self._one_layer(layout)))

    def moved_again_bytes(self, layout: Layout, recompute: str) -> int:
        operations = forward_operations(*self._one_layer(layout))
        # The second run stops before the region's last product, whose output backward doesn't read, and so
        # before the last dropout of the layer.
        products = PAPER_LAYER.products_again(recompute)
        names = {"none": (), "selective": _CORE, "elementwise": _CORE + _ELEMENTWISE}.get(recompute)
        again = [o for o in operations if (o.name in products if o.product else names is None or o.name in names)]
        return sum(o.bytes for o in again if o.name != operations[-1].name)

    def moved_in_end_bytes(self, layout: Layout) -> int:
        # The loss reads 16-bit logits and passes over its float32 copy four times: made, shifted, exp, divided.
        logits = self.seq_length * layout.micro_batch_size * self.shape.vocab_size // layout.tensor_parallel_size
        return (2 + 4 + 3 * 8) * logits

    def layer_exchanges(self, layout: Layout, recompute: str) -> list[Exchange]:
        shape, parallel = self._one_layer(layout)
        return layer_exchanges(shape, parallel, recompute)

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
