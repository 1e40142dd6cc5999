"""What ``measure_paper`` can print: for each table and figure, the measurements it needs and its entries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from actmem.lab.paper import figures, tables, utilisation
from actmem.lab.paper.entries import Entry
from actmem.lab.paper.jobs import Job, Results, Usage, run

Models = Sequence[str]


def _no_jobs(models: Models) -> list[Job]:
    return []


@dataclass(frozen=True)
class Section:
    """jobs: what must be measured for these models.  entries: made from the jobs' results."""

    jobs: Callable[[Models], list[Job]]
    entries: Callable[[Models, Results], list[Entry]]


#: In the order of the paper.
SECTIONS = {
    "figure1": Section(figures.figure1_jobs, figures.figure1),
    "table2": Section(tables.table2_jobs, tables.table2),
    "table3": Section(tables.table3_jobs, tables.table3),
    "figure7": Section(figures.figure7_jobs, figures.figure7),
    "table4": Section(_no_jobs, tables.table4),
    "table5": Section(utilisation.table5_jobs, utilisation.table5),
    "flops": Section(utilisation.flops_jobs, utilisation.flops),
    "figure9": Section(figures.figure9_jobs, figures.figure9),
    "disagreements": Section(_no_jobs, tables.disagreement_entries),
}


def jobs_of(sections: Sequence[str], models: Models) -> list[Job]:
    """Each different measurement that the sections need, once."""
    return list(dict.fromkeys(job for name in sections for job in SECTIONS[name].jobs(models)))


def measure_paper(
    sections: Sequence[str], models: Models, processes: int = 1, on_done: Callable[[Job], None] = lambda job: None
) -> tuple[dict[str, list[Entry]], Usage]:
    """The entries of each section, and what measuring took.  Every rank is emulated: one process is enough."""
    results, usage = run(jobs_of(sections, models), processes, on_done)
    return {name: SECTIONS[name].entries(models, results) for name in sections}, usage
