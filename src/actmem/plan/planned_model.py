"""What the planner asks of a model: bytes, FLOPs and exchanges of its layers and ends on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from actmem.checks import ConfigError, check_choice
from actmem.formulas.communication import Exchange
from actmem.plan.layout import Layout
from actmem.rows import Row, by_term, total

#: What ``where`` begins with in exchanges among context-parallel ranks.
CONTEXT_EXCHANGE = "K and V"
#: The same among the ranks that share experts.
EXPERT_EXCHANGE = "tokens of experts"


@dataclass(frozen=True)
class RankWork:
    """One rank's computation for one microbatch.

    product_flops: of matrix products.  moved_bytes: read and written by all other operations, each alone.
    """

    product_flops: int = 0
    moved_bytes: int = 0

    def __add__(self, other: RankWork) -> RankWork:
        return RankWork(self.product_flops + other.product_flops, self.moved_bytes + other.moved_bytes)

    def times(self, count: int) -> RankWork:
        """The same, ``count`` times."""
        return RankWork(self.product_flops * count, self.moved_bytes * count)


class PlannedModel(ABC):
    """A model with its sequence length.  Methods take the layout; all numbers are of one rank.

    name, num_layers, seq_length.  recompute_modes: names from the least recomputed to the most, each slower and
    smaller than the one before.  routing: of experts, "even" or "one-sided"; empty without them.  numbers: what searches
    have computed of it.
    """

    name: str
    num_layers: int
    seq_length: int
    recompute_modes: Sequence[str]
    context_parallel: bool = False
    routing: str = ""
    numbers: object = None

    def with_modes(self, modes: Sequence[str]) -> PlannedModel:
        """The same model with some of its recomputation modes only.  Raises ConfigError on an unknown one."""
        for mode in modes:
            check_choice("recompute", mode, self.recompute_modes)
        fewer = copy(self)
        fewer.recompute_modes = tuple(mode for mode in self.recompute_modes if mode in modes)
        return fewer

    def with_routing(self, routing: str) -> PlannedModel:
        """The same model with another routing of its experts.  Raises ConfigError if it has none."""
        raise ConfigError("routing", f"{self.name} has no experts")

    def missing_axis(self, name: str) -> str:
        """Why no layout of this model has more than one rank on that axis of Layout; empty if some may."""
        if name == "context_parallel_size" and not self.context_parallel:
            return f"{self.name}'s layer has no context parallelism"
        return ""

    @abstractmethod
    def refusal(self, layout: Layout) -> str:
        """Why t or context ranks can't share a layer; empty if they can."""

    @abstractmethod
    def layer_rows(self, layout: Layout, recompute: str, device_type: str = "cuda") -> list[Row]:
        """What one layer keeps of one microbatch."""

    @abstractmethod
    def first_rows(self, layout: Layout) -> list[Row]:
        """What the embedding keeps of one microbatch."""

    @abstractmethod
    def last_rows(self, layout: Layout, device_type: str = "cuda") -> list[Row]:
        """What the final norm, the output layer and the loss keep of one microbatch; the logits are among them."""

    @abstractmethod
    def layer_parameters(self, layout: Layout) -> int:
        """Elements of one layer."""

    @abstractmethod
    def end_parameters(self, layout: Layout, first: bool, last: bool) -> int:
        """Elements of the embedding, if ``first``, and of the final norm and output layer, if ``last``."""

    @abstractmethod
    def layer_work(self, layout: Layout) -> RankWork:
        """One layer's forward pass."""

    @abstractmethod
    def added_work(self, layout: Layout, recompute: str) -> RankWork:
        """What recomputation runs again in one layer."""

    @abstractmethod
    def last_work(self, layout: Layout) -> RankWork:
        """The output layer's forward pass."""

    @abstractmethod
    def layer_exchanges(self, layout: Layout, recompute: str) -> list[Exchange]:
        """Exchanges of one layer among tensor- and context-parallel ranks, forward and backward."""

    def recomputed_rows(self, layout: Layout, recompute: str, device_type: str = "cuda") -> list[Row]:
        """What one layer's second run makes again, all of it alive when that layer's backward begins."""
        kept = by_term(self.layer_rows(layout, recompute, device_type))
        return [
            Row(row.term, row.bytes - kept.get(row.term, 0), row.split_by, "made again, one layer", row.extra)
            for row in self.layer_rows(layout, "none", device_type)
            if row.bytes > kept.get(row.term, 0)
        ]

    @abstractmethod
    def last_layer_backward(
        self, layout: Layout, recompute: str, first: bool, last: bool, device_type: str = "cuda"
    ) -> list[Row]:
        """What backward has made at its fullest moment up to a stage's last layer, less what it has freed by then.

        first, last: whether the stage has the model's ends.
        """

    @abstractmethod
    def embedding_backward(self, layout: Layout, last: bool, device_type: str = "cuda") -> list[Row]:
        """The same in the embedding's backward, after all layers; what they kept is not among the rows."""

    def transient_rows(
        self, layout: Layout, recompute: str, first: bool, last: bool, layers: int, device_type: str = "cuda"
    ) -> list[Row]:
        """What a microbatch's backward has made at its fullest moment beside what is kept, less what it has freed by then.

        layers: of the stage, or of the chunk whose backward comes next.  A random-number state counts as held to the end.
        """
        rows = self.last_layer_backward(layout, recompute, first, last, device_type)
        if not first:
            return rows
        held = layers * self.freed_by_layer(layout, recompute, device_type)
        held += total(self.last_rows(layout, device_type)) if last else 0
        gone = Row("layers, freed by then", -held, source="backward is done with them")
        return max(rows, [*self.embedding_backward(layout, last, device_type), gone], key=total)

    def freed_by_layer(self, layout: Layout, recompute: str, device_type: str = "cuda") -> int:
        """Bytes that one layer's backward frees: all that it kept but random-number states."""
        rows = self.layer_rows(layout, recompute, device_type)
        return sum(row.bytes for row in rows if row.term != "random-number state")

    @abstractmethod
    def model_flops(self, global_batch_size: int) -> int:
        """FLOPs of one step of the whole model without recomputation."""

    @abstractmethod
    def with_sequence(self, seq_length: int) -> PlannedModel:
        """The same model for sequences of another length.  Raises ConfigError on a bad one."""

    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Its sizes by the field's names: ``hidden_size``, ``num_attention_heads``, …"""

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Parameters of the whole model."""

    def output_bytes(self, layout: Layout) -> int:
        """What one stage sends to the next for one microbatch, in 16 bits."""
        cut = layout.tensor_parallel_size if layout.sequence_parallel else 1
        tokens = self.seq_length // layout.context_parallel_size * layout.micro_batch_size
        return 2 * tokens * self.width // cut

    @property
    @abstractmethod
    def width(self) -> int:
        """Hidden size h."""
