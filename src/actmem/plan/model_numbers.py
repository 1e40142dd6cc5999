"""What layouts of one model share, whatever the cluster: each number is computed once for the axes that it depends on.

Two layouts that differ in one axis share most of their numbers, and so do two searches of one model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from actmem.checks import ConfigError
from actmem.plan.layout import Layout
from actmem.plan.planned_model import PlannedModel
from actmem.plan.rank_bill import parameters_on_rank, stage_layers, static_lines
from actmem.rows import total


class ModelNumbers:
    """Bytes and elements of one model.  ``inner`` are the axes that one layer sees; ``of`` has a layout for each."""

    def __init__(self, model: PlannedModel):
        self.model = model
        self.of: dict[tuple, Layout] = {}
        self.kept = cache(self._kept)
        self.ends = cache(self._ends)
        self.static = cache(self._static)
        self.transient = cache(self._transient)
        self.elements = cache(self._elements)
        self.refusal = cache(self._refusal)
        self.spread = cache(self._spread)

    def _refusal(self, inner: tuple) -> str:
        return self.model.refusal(self.of[inner])

    def _spread(self, p: int, m: int) -> list[int] | str:
        """Layers of each pipeline rank, or why they can't be spread."""
        try:
            return stage_layers(self.model.num_layers, Layout(pipeline_parallel_size=p, num_model_chunks=m))
        except ConfigError as error:
            return str(error)

    def _kept(self, inner: tuple, recompute: str) -> int:
        return total(self.model.layer_rows(self.of[inner], recompute))

    def _ends(self, inner: tuple) -> tuple[int, int]:
        layout = self.of[inner]
        return total(self.model.first_rows(layout)), total(self.model.last_rows(layout))

    def _transient(self, inner: tuple, recompute: str, first: bool, last: bool, layers: int) -> int:
        return total(self.model.transient_rows(self.of[inner], recompute, first, last, layers))

    def _static(self, inner: tuple, p: int, dp: int, zero: int, rank: int) -> int:
        layout = replace(
            self.of[inner], pipeline_parallel_size=p, num_model_chunks=1, data_parallel_size=dp, zero_stage=zero
        )
        return sum(line[2] for line in static_lines(self.model, layout, rank))

    def _elements(self, inner: tuple, p: int) -> int:
        """Parameters of pipeline rank 0."""
        layout = replace(self.of[inner], pipeline_parallel_size=p, num_model_chunks=1)
        return parameters_on_rank(self.model, layout, 0)


def numbers_of(model: PlannedModel) -> ModelNumbers:
    """The model's numbers.  They live as long as it does, so that searches of one model share them; a changed copy has its own."""
    numbers = model.numbers
    if not isinstance(numbers, ModelNumbers) or numbers.model is not model:
        numbers = model.numbers = ModelNumbers(model)
    return numbers
