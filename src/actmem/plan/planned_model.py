"""What the planner asks of a model: bytes, FLOPs and exchanges of its layers and ends on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from actmem.checks import check_choice
from actmem.formulas.communication import Exchange
from actmem.plan.layout import Layout
from actmem.rows import Row, by_term

#: What ``where`` begins with in exchanges among context-parallel ranks.
CONTEXT_EXCHANGE = "K and V"


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
    smaller than the one before.
    """

    name: str
    num_layers: int
    seq_length: int
    recompute_modes: Sequence[str]
    num_experts: int = 1
    context_parallel: bool = False

    def with_modes(self, modes: Sequence[str]) -> PlannedModel:
        """The same model with some of its recomputation modes only.  Raises ConfigError on an unknown one."""
        for mode in modes:
            check_choice("recompute", mode, self.recompute_modes)
        fewer = copy(self)
        fewer.recompute_modes = tuple(mode for mode in self.recompute_modes if mode in modes)
        return fewer

    @abstractmethod
    def refusal(self, layout: Layout) -> str:
        """Why t, context or expert ranks can't share a layer; empty if they can."""

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
    def layer_parameters(self, layout: Layout) -> tuple[int, int]:
        """Elements of one layer: those that every data-parallel rank has, and those of its own experts."""

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
    def transient_rows(self, layout: Layout, recompute: str, last: bool, device_type: str = "cuda") -> list[Row]:
        """What the fullest operation of backward makes and frees again, beside what is kept."""

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
