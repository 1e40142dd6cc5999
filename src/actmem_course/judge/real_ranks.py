"""Judge under torchrun: run the cases (the functions that test exercises) on real ranks, with gloo or NCCL.

If the learner's collectives don't match, they hang until torchrun's timeout; on virtual ranks the judge names the
mismatch.
"""

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

#: How many seconds a rank waits for another's outcome, which may itself wait for something in a case.
_SECONDS = 300


class RealRank:
    """This process as a rank on which a case runs, with the methods of ``VirtualRank`` that a case needs.

    Args:
        store: this rank's connection to the store through which the ranks exchange values.
    """

    def __init__(self, store: RankStore):
        self.store, self.number, self.size = store, store.rank, store.size

    def gather(self, value: object) -> list:
        """Collect a value from every rank, in rank order.  Raises PeerStopped if another rank has ended the case."""
        try:
            return self.store.gather(value)
        except dist.DistStoreError:
            raise PeerStopped from None

    def calling(self) -> None:
        """Do nothing: a case calls this before each call of a learner's function, which only virtual ranks count."""

    @contextmanager
    def watching(self, expected: list[int] | None = None) -> Iterator[count_collectives]:
        """Make a context that records the collectives that run in it.

        Forgotten ``wait()`` calls, and collectives that autograd doesn't record, are found on virtual ranks only.

        Args:
            expected: numbers of the ranks among which collectives may run; only virtual ranks check that.

        Yields: an object whose ``collectives`` lists what ran, as that of a ``Watch``.
        """
        with count_collectives() as seen:
            seen.unwaited, seen.unrecorded = [], ""
            yield seen


@ends_in_a_line
def judge_on_this_rank(lab: Lab, exercises: tuple[Exercise, ...], args: Namespace, script: Path, report: Report) -> int:
    """Judge a learner's file as one of torchrun's ranks; rank 0 prints the verdicts.

    Args:
        lab: the lab to which the file belongs.
        exercises: the exercises to judge.
        args: the command line's options, of which ``device`` is used: "auto", "cpu" or "cuda".
        script: the path of the learner's file.
        report: shows the verdicts on rank 0.

    Returns: the exit code: on rank 0, 0 if all exercises have passed and 1 if not; on other ranks 0.
    """
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
    """Judge exercises on this rank, together with the other ranks.

    A function that doesn't pass is replaced by our solution's function for the exercises after it.

    Args:
        lab: the lab to which the exercises belong.
        exercises: the exercises to judge.
        names: the names that the learner's file defines, with their values; this dict is changed.
        device: "cpu" or "cuda".

    Yields: each exercise's verdict, the same on every rank.
    """
    learners, ours, outcomes = dict(names), vars(solution_module(lab.name)), connect("outcomes", _SECONDS)
    for exercise in exercises:
        names[exercise.function] = learners.get(exercise.function)
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
            error = PeerStopped()  # the rank that raised has the reason; it doesn't run ours, so nobody can
        outcome = outcome_of(exercise, names, side.number, error)
        everyone = outcomes.gather(outcome and astuple(outcome))
        by_rank = [fields and Outcome(fields[0], fields[1], Fault(*fields[2]), *fields[3:]) for fields in everyone]
        verdict = verdict_of(exercise, by_rank)
        yield verdict
        if verdict.status != PASSED:
            names[exercise.function] = ours[exercise.function]


def _fault(exercise: Exercise, run: CaseRun) -> Wrong | None:
    """Run the case with our own functions, and describe how the learner's run on this rank is wrong beside it.

    Returns: what is wrong, or None if nothing is.
    """
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
