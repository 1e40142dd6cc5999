"""What the planner asks of a model: bytes, FLOPs and exchanges of its layers and ends on one rank."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from actmem.checks import ConfigError, check_choice
from actmem.formulas.communication import Exchange
from actmem.plan.layout import Layout
from actmem.rows import Row
from actmem.tape.stage_tapes import StagePart

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


def shared_by(layout: Layout) -> str:
    """What the tensor-parallel ranks share, as tapes say it."""
    return "alone" if layout.tensor_parallel_size == 1 else "sequence" if layout.sequence_parallel else "tensor"


class PlannedModel(ABC):
    """A model with its sequence length.  Methods take the layout; all numbers are of one rank.

    name, num_layers, seq_length.  recompute_modes: names from the least recomputed to the most, each slower and
    smaller than the one before.  routing: of experts, "even" or "one-sided"; empty without them.
    """

    name: str
    num_layers: int
    seq_length: int
    recompute_modes: Sequence[str]
    context_parallel: bool = False
    routing: str = ""

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
    def layer_exchanges(self, layout: Layout, recompute: str) -> list[Exchange]:
        """Exchanges of one layer among tensor- and context-parallel ranks, forward and backward."""

    @abstractmethod
    def part(self, layout: Layout, what: str, device_type: str = "cuda") -> StagePart:
        """The tape of one layer ("layer none", or another mode) or of the ends ("first", "last", "whole") on one rank."""

    def parts(
        self, layout: Layout, recompute: str, first: bool, last: bool, device_type: str = "cuda"
    ) -> tuple[StagePart, StagePart | None]:
        """The tapes of a stage: of a layer, and of the ends that it has.

        first, last: whether the stage has the model's ends.  A random-number state counts as held to the end.
        """
        ends = "whole" if first and last else "first" if first else "last" if last else ""
        layer = self.part(layout, f"layer {recompute}", device_type)
        return layer, self.part(layout, ends, device_type) if ends else None

    def layer_work(self, layout: Layout) -> RankWork:
        """One layer's forward pass."""
        return RankWork(self.part(layout, "layer none").forward_flops, self.moved_bytes(layout))

    def added_work(self, layout: Layout, recompute: str) -> RankWork:
        """What recomputation runs again in one layer."""
        mode, none = (self.part(layout, f"layer {each}") for each in (recompute, "none"))
        return RankWork(mode.backward_flops - none.backward_flops, self.moved_again_bytes(layout, recompute))

    def last_work(self, layout: Layout) -> RankWork:
        """The output layer's forward pass."""
        return RankWork(self.part(layout, "last").forward_flops, self.moved_in_end_bytes(layout))

    @abstractmethod
    def moved_bytes(self, layout: Layout) -> int:
        """Bytes that one layer's forward pass reads and writes, each operation alone."""

    @abstractmethod
    def moved_again_bytes(self, layout: Layout, recompute: str) -> int:
        """Those of what recomputation runs again."""

    @abstractmethod
    def moved_in_end_bytes(self, layout: Layout) -> int:
        """Those of the output layer and the loss, forward."""

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
