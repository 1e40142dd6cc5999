"""What a search finds: plans that fit, and layouts that don't."""

from __future__ import annotations

from dataclasses import dataclass, field

from actmem.plan.layout import Layout
from actmem.plan.seconds import StepSeconds


@dataclass(frozen=True)
class Plan:
    """One way to run the job: its layout, what is recomputed, and what that costs on the fullest rank.

    whole_microbatches: of those in flight, how many keep everything (appendix C).  recomputed: the share of
    microbatches that recompute.  bytes: of pipeline_rank at its peak, without the allowance.
    """

    layout: Layout
    recompute: str
    whole_microbatches: int
    recomputed: float
    num_microbatches: int
    pipeline_rank: int
    bytes: int
    seconds: StepSeconds

    @property
    def order(self) -> tuple:
        """Sorts plans: by time, then bytes, then sizes, so that equals come out in one order."""
        layout = self.layout
        sizes = (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.num_model_chunks)
        rest = (layout.context_parallel_size, layout.micro_batch_size, layout.zero_stage)
        return (self.seconds.total, self.bytes, sizes, rest, not layout.sequence_parallel)


@dataclass(frozen=True)
class Refused:
    """A layout that doesn't fit even with everything recomputed: its least bytes on the fullest rank."""

    layout: Layout
    recompute: str
    num_microbatches: int
    pipeline_rank: int
    bytes: int


@dataclass
class Found:
    """The outcome of a search.  plans: that fit, fastest first.  nearest: of those that don't, the smallest first.

    counted: layouts whose bytes were computed; fitting: of them, those that fit.  unfit: reasons why sizes don't go together, with how many
    layouts each ruled out.
    """

    plans: list[Plan]
    nearest: list[Refused]
    counted: int
    fitting: int
    unfit: dict[str, int] = field(default_factory=dict)
