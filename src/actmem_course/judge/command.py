"""A lab's command line: judge, hint, solution, reward."""

from __future__ import annotations

import io
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from rich.text import Text

from actmem.config import ConfigError, check_size
from actmem_course.arguments import LabParser, add_json_argument, tell_torchrun
from actmem_course.copies import file_to_judge, typed
from actmem_course.files import check_files, replacing
from actmem_course.guard import leave
from actmem_course.judge.catalogue import lab_name, load_lab, solutions_of
from actmem_course.judge.exercise import Exercise, Lab
from actmem_course.judge.hints import next_hints
from actmem_course.judge.judging import judge
from actmem_course.judge.report import Report
from actmem_course.judge.verdict import PASSED, TODO, Verdict
from actmem_course.judge.watchdog import Watchdog
from actmem_course.judge.workbench import Bench
from actmem_course.process import lab as lab_process
from actmem_course.process import lab_console
from actmem_course.rank_store import RanksLost, RankStore, connect
from actmem_course.ranks import Ranks, add_rank_arguments, check_ranks, ranks
from actmem_course.start import start_ranks


@lab_process
def main(functions: dict) -> int:
    """Judge the learner's file whose ``globals()`` are given.

    Returns the exit code: 0 all passed, 1 something to do.  Wrong use ends the process with 2.
    """
    script = Path(functions.get("__file__") or "a lab")
    # torch 2.13 has new names for two collectives; the old ones are right, and the only ones before it.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated. Please use .*_single")
    doc = functions.get("__doc__") or ""
    with LabParser(prog=script.name).refusing():
        if not script.is_file():
            raise ConfigError("file", "a lab is judged as a file: python my/labs/lab1_count_bytes.py")
        lab = load_lab(lab_name(script, doc))
    parser = _parser(lab, script.name, doc)
    args = parser.parse_args()
    with parser.refusing():
        exercises = lab.choose([number for text in args.only or () for number in text.split(",")], "only")
        if args.hint is not None:
            _check_alone(args, parser)
            return _hint(lab.choose([args.hint], "hint")[0])
        check_files(args, "json", "html")
        if not args.solution:
            _judge_the_copy(script)
        if lab.one_process:
            alone = Ranks(0, 1, _device(args), emulated=False)
            return (
                0
                if int(os.environ.get("RANK", "0"))
                else _judge_here(lab, exercises, args, functions, script, alone, RankStore())
            )
        if "RANK" not in os.environ:
            size = 2 if args.ranks is None else check_size("ranks", args.ranks, largest=64)
            return start_ranks(str(script), sys.argv[1:], size)
        check_ranks(args, script.name)
    try:
        with ranks(args) as here:
            code = _judge_here(lab, exercises, args, functions, script, here, connect("judge"))
    except RanksLost:
        time.sleep(10)  # the watchdog says what happened, and ends this process
        leave(1)
    # torchrun ends every rank as soon as one fails, so only the one that prints does.
    return code if here.rank == 0 else 0


def _judge_the_copy(script: Path) -> None:
    """Go on as the learner's copy if that is what should be judged instead of ``script``."""
    if os.environ.get("RANK", "0") != "0" and "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    alone = "RANK" not in os.environ
    try:
        judged, remark = file_to_judge(script, may_write=alone)
    except OSError as error:  # a checkout that belongs to somebody else
        judged, remark = script.resolve(), f"no copy of your own: cannot write {error.filename}: {error.strerror}"
    if remark and (alone or "TORCHELASTIC_RUN_ID" in os.environ and os.environ["RANK"] == "0"):
        print(remark, file=sys.stderr, flush=True)
    if judged != script.resolve():
        own = sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv)]  # Python's own options
        os.execv(sys.executable, [sys.executable, *own, str(judged), *sys.argv[1:]])


def _parser(lab: Lab, script: str, doc: str) -> LabParser:
    parser = LabParser(prog=script, description=doc.partition("\n\n")[2] or lab.title)
    parser.add_argument("--hint", metavar="N", help="one more hint for exercise N, such as 2.1")
    parser.add_argument(
        "--only", metavar="N", action="append", help="judge exercise N only (again, or N,M, for several)"
    )
    parser.add_argument("--solution", action="store_true", help="judge our solution instead of this file")
    add_json_argument(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the measurement as a figure (needs plotly)")
    add_rank_arguments(parser, emulate=False, start=not lab.one_process)
    return parser


def _check_alone(args, parser: LabParser) -> None:
    """Raise ConfigError on options that a hint has no use for."""
    for name, value in vars(args).items():
        if name != "hint" and value != parser.get_default(name):
            raise ConfigError(name, "has no effect beside --hint: leave one of them out")


def _hint(exercise: Exercise) -> int:
    if int(os.environ.get("RANK", "0")) == 0:
        screen = lab_console(highlight=False, emoji=False)
        screen.print(Text(f"{exercise.number} {exercise.function}", style="bold"))
        for number, hint in enumerate(next_hints(exercise), 1):
            screen.print(Text(f"{number} of {len(exercise.hints)}", style="dim"), Text(hint), sep="\n")
    return 0


def _judge_here(
    lab: Lab,
    exercises: tuple[Exercise, ...],
    args,
    functions: dict,
    script: Path,
    here: Ranks,
    store: RankStore,
) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # When rank 0 ends with 1 the other ranks are ended: what a learner printed there must be out by then.
        sys.stdout.reconfigure(line_buffering=True, write_through=False)
    os._exit = sys.exit  # type: ignore[assignment]  # else a learner's os._exit(0) ends with 0 and no verdict
    if args.solution:
        functions = solutions_of(lab.name)
    report = Report(lab, typed(script), quiet=here.rank > 0, json_file=args.json)
    b = Bench(functions, store, here.device)

    def on_stuck(verdict: Verdict) -> None:
        if here.rank:  # rank 0 is gone, so another one speaks
            report.console.quiet = report.quiet = False
        report.show(verdict)
        judged = {shown.exercise for shown in report.verdicts}
        for exercise in exercises:
            if exercise.number not in judged:
                reason = f"not judged: {verdict.exercise} ended the ranks"
                report.show(Verdict(exercise.number, exercise.function, TODO, reason))
        _end(report, script)

    watchdog = Watchdog(connect("watchdog") if store.size > 1 else store, b.place, on_stuck)

    def on_progress(text: str = "") -> None:
        watchdog.progress()
        report.note(text)

    b.progress = on_progress
    watchdog.start()
    store.gather(None)  # nobody runs a learner's code before every rank can say what became of another
    how = f"on {here.device}" if lab.one_process else f"{here.size} rank{'s' * (here.size > 1)} on {here.device}"
    report.head(f"our solution, {how}" if args.solution else how)

    def on_start(exercise: Exercise) -> None:
        watchdog.begin(exercise)
        report.begin(f"judging {exercise.number} {exercise.function}")

    def on_verdict(verdict: Verdict) -> None:
        watchdog.idle()
        report.show(verdict)

    verdicts = judge(lab, exercises, b, on_start, on_verdict)
    passed = all(verdict.status == PASSED for verdict in verdicts)
    _end(report, script)
    if passed and lab.reward and exercises == lab.exercises:
        _reward(lab.reward, b, report, watchdog, args)
    watchdog.stop()
    sys.stdout.flush()
    return 0 if passed else 1


def _reward(measure: Callable, b: Bench, report: Report, watchdog: Watchdog, args) -> None:
    watchdog.begin(Exercise("", "the measurement", measure, (), seconds=300))
    b.start("the measurement")
    try:
        report.begin("measuring")
        reward = measure(b)
    except Exception as error:  # all has passed; a failing measurement must not hide that
        b.in_step.stop()
        report.console.print(Text(f"no measurement: {type(error).__name__}: {error}"))
        return
    finally:
        watchdog.idle()
        report.pause()
    if b.rank == 0:
        reward.show(report.console)
        if args.html:
            with replacing(args.html) as beside:
                reward.write_html(beside)


def _device(args) -> str:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "torch finds no CUDA GPU here")
    return ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device


def _end(report: Report, script: Path) -> None:
    """The last of the verdicts.  Under torchrun, whose own report follows if something is left to do, say what that is."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        report.end()
        return
    report.end(f"(torchrun reports exit code 1 below; python {typed(script)} ends without it)")
    if any(verdict.status != PASSED for verdict in report.verdicts):
        tell_torchrun("nothing failed but the lab: its verdicts are above")
