"""Judging under torchrun: the same cases on real ranks, over gloo or NCCL, each process with its own answer.

A learner's collective that hangs here is torchrun's to end; virtual ranks would have named it.
"""

from __future__ import annotations

import os
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import astuple, replace
from pathlib import Path

import torch.distributed as dist

from actmem.ledger.comms import count_collectives
from actmem_course.arguments import tell_torchrun
from actmem_course.judge.case import CaseRun
from actmem_course.judge.exercise import Exercise, Lab
from actmem_course.judge.judging import Outcome, outcome_of, verdict_of
from actmem_course.judge.observations import RunOutcome, differences, first_finding
from actmem_course.judge.outline import case_of, lab_of, solution_module
from actmem_course.judge.report import Report
from actmem_course.judge.verdict import PASSED, Fault, PeerStopped, Verdict, Wrong
from actmem_course.judge.worker import names_in
from actmem_course.process import lab as ends_in_a_line
from actmem_course.rank_store import RankStore, connect
from actmem_course.ranks import check_ranks, ranks

#: How long ranks wait for another's outcome, where it waits for theirs in a case.
_SECONDS = 300


class RealRank:
    """This process among those of its group."""

    def __init__(self, store: RankStore):
        self.store, self.number, self.size = store, store.rank, store.size

    def gather(self, value: object) -> list:
        """Every rank's ``value``, by rank; ends this rank's judging if another has ended its own."""
        try:
            return self.store.gather(value)
        except dist.DistStoreError:
            raise PeerStopped from None

    def calling(self) -> None:
        """The case calls a function of the file, which nobody here counts."""

    @contextmanager
    def watching(self, expected: list[int] | None = None) -> Iterator[count_collectives]:
        """Counts; what else is to be found out about a learner's collectives, virtual ranks find out."""
        with count_collectives() as seen:
            seen.unwaited, seen.unrecorded = [], ""
            yield seen


@ends_in_a_line
def judge_on_this_rank(lab: Lab, exercises: tuple[Exercise, ...], args: Namespace, script: Path, report: Report) -> int:
    """Judge as one of torchrun's ranks; rank 0 says the verdicts.  Returns the exit code."""
    rank, here = int(os.environ["RANK"]), Namespace(ranks=None, emulate=None, device=args.device)
    if lab.one_process and rank:
        return 0
    check_ranks(here, script.name)
    warnings.simplefilter("ignore")  # torch's, of the judge's own tensors as well
    if rank == 0:
        report.line(f"real ranks on {here.device}", "dim")
    names = names_in(script, script.read_bytes())
    with nullcontext() if lab.one_process else ranks(here):
        for verdict in verdicts_here(lab, exercises, names, here.device):
            if rank == 0:
                report.show(verdict, verdict.why)
    if rank:
        return 0
    report.end()
    if not report.all_passed:
        tell_torchrun("nothing failed but the lab: its verdicts are above")
    return 0 if report.all_passed else 1


def verdicts_here(lab: Lab, exercises: tuple[Exercise, ...], names: dict, device: str) -> Iterator[Verdict]:
    """The verdict of all ranks on each exercise, on every rank; our own functions replace what has not passed."""
    own, ours, outcomes = dict(names), vars(solution_module(lab.name)), connect("outcomes", _SECONDS)
    for exercise in exercises:
        names[exercise.function] = own.get(exercise.function)
        side = RealRank(connect(exercise.number))
        error: BaseException | None = None
        run = CaseRun(names, side, "", device)
        try:
            case_of(exercise)(run)
        except (Exception, SystemExit, PeerStopped) as raised:
            error = raised
        if all(outcomes.gather(error is None)):
            error = _fault(exercise, run)
        elif error is None:
            error = PeerStopped()  # whoever has ended has the reason, and runs nothing of ours
        outcome = outcome_of(exercise, names, side.number, error)
        told = outcomes.gather(outcome and astuple(outcome))
        everyone = [one and Outcome(one[0], one[1], Fault(*one[2]), one[3], one[4]) for one in told]
        verdict = verdict_of(exercise, everyone)
        yield verdict
        if verdict.status != PASSED:
            names[exercise.function] = ours[exercise.function]


def _fault(exercise: Exercise, run: CaseRun) -> Wrong | None:
    """What this rank saw that our own functions don't, or all ranks together did."""
    if not run.seen:
        return None
    ours = CaseRun(vars(solution_module(lab_of(exercise).name)), run.side, "", run.device)
    case_of(exercise)(ours)
    found, right = (RunOutcome([dict(one.seen) for _ in range(run.t)], []) for one in (run, ours))
    for name, seen in ours.seen.items():
        if seen.of_all_ranks:
            for outcome, one in ((found, run), (right, ours)):
                for values, value in zip(outcome.seen, one.gather(one.seen[name].value)):
                    values[name] = replace(seen, value=value)
    wrong = differences(found, right)
    if not wrong:
        return None
    finding = first_finding(found, right, wrong)
    return Wrong(finding.symptom, finding.repair, finding.cause)
