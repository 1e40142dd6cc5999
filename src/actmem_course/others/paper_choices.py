"""The paper's own plans for its four models beside the planner's best, in wider and wider searches.

The paper's code had three recomputation modes and divided no optimizer states among data-parallel
ranks.  Among the plans that it could run, the paper's are within 7% of the fastest by predicted time.
What came later, ZeRO and elementwise recomputation, is faster still, by as much as times can't tell.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from actmem.config import check_choice
from actmem.models import PAPER_MODELS, PaperModel
from actmem.plan.layout import ZERO_STAGES
from actmem.plan.planned_models import PlannedGPT
from actmem.plan.search import Plan, find_plans
from actmem.plan.step_time import DEVICES, Cluster
from actmem_course.others.paper import A100_BYTES

#: The modes that 2205.05198 compares.
PAPER_MODES = ("none", "selective", "full")

#: What each search may use: its recomputation modes and its ZeRO stages.
SEARCHES: Mapping[str, tuple[Collection[str], Collection[int]]] = {
    "the paper's code": (PAPER_MODES, (0,)),
    "with ZeRO-1": (PAPER_MODES, (0, 1)),
    "with ZeRO-1 to 3": (PAPER_MODES, ZERO_STAGES),
    "with elementwise too": ((*PAPER_MODES, "elementwise"), ZERO_STAGES),
}


@dataclass(frozen=True)
class PaperChoice:
    """The paper's plan for one of its models, and the fastest of each search by its name in SEARCHES."""

    model: str
    plan: Plan
    best: Mapping[str, Plan]

    def behind(self, search: str) -> float:
        """How much longer the paper's plan takes than the search's best: 0.05 is 5%."""
        return self.plan.seconds.total / self.best[search].seconds.total - 1

    def hidden_seconds(self, search: str) -> float:
        """Seconds of the search's best in which exchanges run beside its computing."""
        return self.best[search].seconds.hidden


def paper_choice(model: str) -> PaperChoice:
    """Plan one of the paper's models on its own GPUs.  Raises ConfigError on another name."""
    check_choice("model", model, PAPER_MODELS)
    paper = PAPER_MODELS[model]
    plans = {modes: _all_plans(paper, modes) for modes in {modes for modes, _ in SEARCHES.values()}}
    best = {
        search: next(plan for plan in plans[modes] if plan.layout.zero_stage in stages)
        for search, (modes, stages) in SEARCHES.items()
    }
    return PaperChoice(model, next(plan for plan in plans[PAPER_MODES] if _is_papers(plan, paper)), best)


def _cluster(paper: PaperModel) -> Cluster:
    return Cluster(paper.num_devices, A100_BYTES, device=DEVICES["a100"])


def _all_plans(paper: PaperModel, modes: Collection[str]) -> list[Plan]:
    gpt = PlannedGPT(paper.name, paper.shape).with_modes(list(modes))
    return find_plans(gpt, _cluster(paper), paper.global_batch_size, keep=10**6).plans


def _is_papers(plan: Plan, paper: PaperModel) -> bool:
    """t, p, m and b of table 3, with sequence parallelism; on table 3's GPUs that leaves one data-parallel rank."""
    layout = plan.layout
    return layout.parallel == paper.parallel and layout.micro_batch_size == paper.shape.micro_batch_size
