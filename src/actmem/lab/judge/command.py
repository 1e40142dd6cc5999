"""A lab's command line: judge, hint, solution, reward."""

from __future__ import annotations

import io
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from actmem.config import ConfigError, check_size
from actmem.lab.arguments import LabParser, add_json_argument, check_writable
from actmem.lab.judge.bench import Bench
from actmem.lab.judge.exercise import Exercise, Lab, load_lab, solutions_of
from actmem.lab.judge.hints import next_hints
from actmem.lab.judge.judging import judge
from actmem.lab.judge.report import Report
from actmem.lab.judge.start import start_ranks
from actmem.lab.judge.together import RanksLost, Together, join, second_line
from actmem.lab.judge.verdict import PASSED, TODO, Verdict
from actmem.lab.judge.watchdog import Watchdog
from actmem.lab.ranks import Ranks, add_rank_arguments, check_ranks, ranks


def main(functions: dict) -> int:
    """Judge the learner's file whose ``globals()`` are given.

    Returns the exit code: 0 all passed, 1 something to do.  Wrong use ends the process with 2.
    """
    script = Path(functions["__file__"])
    # torch 2.13 has new names for two collectives; the old ones are right, and the only ones before it.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated. Please use .*_single")
    lab = load_lab(script.stem)
    parser = _parser(lab, script.name, functions["__doc__"] or "")
    args = parser.parse_args()
    with parser.refusing():
        exercises = lab.choose([number for text in args.only or () for number in text.split(",")], "only")
        if args.hint:
            return _hint(lab.choose([args.hint], "hint")[0])
        if args.ranks is not None:
            check_size("ranks", args.ranks, largest=64)
        for name in ("json", "html"):
            if int(os.environ.get("RANK", "0")) == 0:
                check_writable(name, getattr(args, name))
        if lab.one_process:
            alone = Ranks(0, 1, _device(args), emulated=False)
            return 0 if int(os.environ.get("RANK", "0")) else _judge_here(lab, exercises, args, functions, script, alone, Together())
        if "RANK" not in os.environ:
            return start_ranks(str(script), sys.argv[1:], 2 if args.ranks is None else args.ranks)
        if args.ranks is not None and "TORCHELASTIC_RUN_ID" in os.environ:
            parser.error("--ranks: torchrun has started the ranks already")
        check_ranks(args, script.name)
    try:
        with ranks(args) as here:
            code = _judge_here(lab, exercises, args, functions, script, here, join())
    except RanksLost:
        time.sleep(10)  # the watchdog says what happened, and ends this process
        os._exit(1)
    except KeyboardInterrupt:
        os._exit(130)
    # torchrun ends every rank as soon as one fails, so only the one that prints does.
    return code if here.rank == 0 else 0


def _parser(lab: Lab, script: str, doc: str) -> LabParser:
    parser = LabParser(prog=script, description=doc.partition("\n\n")[2] or lab.title)
    parser.add_argument("--hint", metavar="N", help="one more hint for exercise N, such as 2.1")
    parser.add_argument("--only", metavar="N", action="append", help="judge exercise N only (again, or N,M, for several)")
    parser.add_argument("--solution", action="store_true", help="judge our solution instead of this file")
    add_json_argument(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the measurement as a figure (needs plotly)")
    add_rank_arguments(parser, emulate=False)
    if lab.one_process:
        parser.set_defaults(ranks=None)
    else:
        parser.add_argument("--ranks", type=int, metavar="N", help="without torchrun: how many ranks to start (default: 2)")
    return parser


def _hint(exercise: Exercise) -> int:
    if int(os.environ.get("RANK", "0")) == 0:
        console = Console(highlight=False, emoji=False)
        console.print(Text(f"{exercise.number} {exercise.function}", style="bold"))
        for number, hint in enumerate(next_hints(exercise), 1):
            console.print(Text(f"{number} of {len(exercise.hints)}", style="dim"), Text(hint), sep="\n")
    return 0


def _judge_here(
    lab: Lab,
    exercises: tuple[Exercise, ...],
    args,
    functions: dict,
    script: Path,
    here: Ranks,
    together: Together,
) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        # When rank 0 ends with 1 the other ranks are ended: what a learner printed there must be out by then.
        sys.stdout.reconfigure(line_buffering=True)
    if args.solution:
        functions = solutions_of(lab.name)
    report = Report(lab, script.name, quiet=here.rank > 0, json_file=args.json)
    b = Bench(functions, together, here.device)

    def on_stuck(verdict: Verdict) -> None:
        if here.rank:  # rank 0 is gone, so another one speaks
            report.console.quiet = report.quiet = False
        report.show(verdict)
        judged = {shown.exercise for shown in report.verdicts}
        for exercise in exercises:
            if exercise.number not in judged:
                reason = f"not judged: {verdict.exercise} ended the ranks"
                report.show(Verdict(exercise.number, exercise.function, TODO, reason))
        report.end(_farewell(script))

    watchdog = Watchdog(second_line(b.together), b.place, on_stuck)
    b.progress = lambda text="": (watchdog.progress(), report.note(text))
    watchdog.start()
    together.gather(None)  # nobody runs a learner's code before every rank can say what became of another
    how = f"on {here.device}" if lab.one_process else f"{here.size} rank{'s' * (here.size > 1)} on {here.device}"
    report.head(f"our solution, {how}" if args.solution else how)

    def on_start(exercise: Exercise) -> None:
        watchdog.begin(exercise)
        report.begin(f"judging {exercise.number} {exercise.function}")

    def on_verdict(verdict: Verdict) -> None:
        watchdog.end()
        report.show(verdict)

    verdicts = judge(lab, exercises, b, on_start, on_verdict)
    passed = all(verdict.status == PASSED for verdict in verdicts)
    report.end(_farewell(script))
    if passed and lab.reward and exercises == lab.exercises:
        _reward(lab, b, report, watchdog, args)
    watchdog.stop()
    sys.stdout.flush()
    return 0 if passed else 1


def _reward(lab: Lab, b: Bench, report: Report, watchdog: Watchdog, args) -> None:
    watchdog.begin(Exercise("", "the measurement", lab.reward, (), seconds=300))
    b.start("the measurement")
    try:
        report.begin("measuring")
        reward = lab.reward(b)
    except Exception as error:  # all has passed; a failing measurement must not hide that
        b.in_step.stop()
        report.console.print(Text(f"no measurement: {type(error).__name__}: {error}"))
        return
    finally:
        watchdog.end()
        report.pause()
    if b.rank == 0:
        reward.show(report.console)
        if args.html:
            reward.write_html(args.html)


def _device(args) -> str:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "torch finds no CUDA GPU here")
    return ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device


def _farewell(script: Path) -> str:
    """What to say last of all if something is left to do."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ""
    return f"(torchrun reports exit code 1 below; python labs/{script.name} does the same without that)"
