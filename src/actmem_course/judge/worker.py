"""The judge's process: ``python -m actmem_course.judge.worker``, started by the parent, which tells it what to judge.

It loads the learner's file, once for each virtual rank, judges, and says on its line what it is doing.  It watches
nobody: the parent sees whether it lives, how long it takes, and asks where it stands.  Started without ACTMEM_VIRTUAL
it is one of several real ranks, which run what has passed once more, and measure.
"""

from __future__ import annotations

import ast
import dataclasses
import faulthandler
import gc
import json
import linecache
import math
import os
import pdb
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterable
from contextlib import redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from importlib.util import decode_source
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional

from actmem.ledger.comms import count_collectives
from actmem_course.judge.judging import Judge, outcome_of
from actmem_course.judge.outline import Exercise, Lab, load_lab, solutions_of
from actmem_course.judge.parent import CRASHES, RANKS_LINE, RANKS_STORE, VIRTUAL
from actmem_course.judge.printed import Printed
from actmem_course.judge.verdict import PASSED, SKIPPED, Verdict
from actmem_course.judge.virtual import Unwanted, VirtualRanks, file_and_line
from actmem_course.judge.workbench import Bench, RealRank
from actmem_course.rank_store import RankStore, connect
from actmem_course.ranks import join_group
from actmem_tools.command_line import screen

_leave = os._exit  # a learner's code meets another one


class Worker:
    """What both kinds of process do: hear the parent, and answer."""

    def __init__(self, line: Connection, device: str):
        self.line, self.device = line, device
        self.printed = Printed(lambda text: self.tell(printed=text))
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        #: Set by the parent when the file has been saved again: what is being judged is of no interest any more.
        self.outdated = threading.Event()

    def tell(self, **message: Any) -> None:
        """Say something to the parent."""
        self.line.send_bytes(json.dumps(message, ensure_ascii=False).encode())

    def listen(self) -> None:
        """Take the parent's commands; end with it.  Runs in a thread of its own."""
        with suppress(EOFError, OSError):
            while True:
                command = json.loads(self.line.recv_bytes())
                if command["do"] == "stop":
                    self.outdated.set()
                elif command["do"] == "where":
                    where, seconds = self.where(command["file"])
                    self.tell(where=where, in_call=seconds)
                else:
                    self.outdated.clear()
                    self.commands.put(command)
        _leave(0)

    def where(self, file: str) -> tuple[str, float]:
        """What the learner's code is doing, in words, and for how many seconds the latest of several calls has run."""
        return _standing(threading.main_thread().ident, file), math.inf

    def run(self) -> None:
        """Do what the parent asks, whenever it asks."""
        while True:
            command = self.commands.get()
            with redirect_stdout(self.printed), redirect_stderr(self.printed):
                getattr(self, command["do"])(command)
            self.tell(done=command["do"])


class VirtualWorker(Worker):
    """Judges on virtual ranks, and remembers between two judgements of a file."""

    def __init__(self, line: Connection, device: str):
        super().__init__(line, device)
        self.judging: Judge | None = None
        #: What each exercise's function and all it uses read when it was judged, and the verdict.
        self.judged: dict[str, tuple[list[str], Verdict]] = {}
        #: What passes with functions of ours in place of others of the file's: see ``Judge``.
        self.waiting: set[tuple] = set()
        self.before: dict[Any, dict[str, Any]] = {}

    def where(self, file: str) -> tuple[str, float]:
        rank = self.judging and self.judging.running
        if not rank:
            return "it is in none of your functions", 0.0
        in_call = time.monotonic() - rank.call_began if rank.calls > 1 else math.inf
        return f"rank {rank.number} {_standing(rank.thread, file)}", in_call

    def warm_up(self) -> None:
        """Load what torch loads when it first sees an operation: seconds that are no learner's."""
        with count_collectives():
            x = torch.ones(2, device=self.device, requires_grad=True)
            (x * 1).sum().backward()

    def judge(self, command: dict[str, Any]) -> None:
        """Every exercise of the command, in order, unless the file has been saved again."""
        lab, path, source = load_lab(command["lab"]), Path(command["file"]), command["source"].encode("latin-1")
        exercises = lab.choose(command["only"], "only")
        _freeze(lab)
        self.before = self.before or _state_of_modules()
        _restore(self.before)
        beside = _forget_modules_beside(path)
        spaces: list[dict] = [{} for _ in range(max(command["size"], lab.fewest_virtual))]
        judge = Judge(
            lab, spaces, self.device, self._progress, lambda: _restore(self.before), self.outdated.is_set, self.waiting
        )
        self.judging = judge
        judge.passed, judge.endless = set(command.get("passed", ())), set(command.get("endless", ()))
        self.printed.size = judge.ranks.size
        try:
            judge.spaces = self._load(judge.ranks, path, source, lab if command["solution"] else None)
        except Unwanted:
            return
        except BaseException as error:
            self._say_unloadable(exercises, path, error)
            return
        finally:
            self.printed.end()
        if not (command["solution"] or beside or _modules_beside(path)):
            judge.texts = _texts(source)
        for exercise in exercises:
            if self.outdated.is_set():
                return
            reads = judge.reads(exercise)
            known = self.judged.get(exercise.number)
            unchanged = bool(command["changed_only"] and known and known[0] == reads and judge.texts)
            if unchanged:
                assert known is not None
                verdict = known[1]
                judge.know(exercise, verdict)
            else:
                self.tell(begin=exercise.number, seconds=exercise.seconds)
                try:
                    verdict = judge.judge(exercise)
                except Unwanted:
                    return
                finally:  # what one exercise's code did to torch, or to the judge, is no other's
                    _restore(self.before)
            self.judged[exercise.number] = reads, verdict
            self.printed.end()
            self.tell(verdict=dataclasses.asdict(verdict), unchanged=unchanged)

    def _progress(self, text: str = "") -> None:
        self.tell(note=text)

    def _load(self, ranks: VirtualRanks, path: Path, source: bytes, ours: Lab | None) -> list[dict]:
        """The names of the file, for each rank from a run of its own."""
        if ours:
            return [dict(solutions_of(ours.name)) for _ in range(ranks.size)]
        found = ranks.run(lambda rank: _names_in(path, source), str(path))
        for names in found:
            if isinstance(names, BaseException):
                raise names
        return found

    def _say_unloadable(self, exercises: Iterable[Exercise], path: Path, error: BaseException) -> None:
        line = error.lineno if isinstance(error, SyntaxError) else None
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = line or (own[-1].lineno if own else None)
        said = str(error).splitlines()[0] if str(error) else ""
        what = f"the file can't be loaded: {type(error).__name__}: {said}"
        if isinstance(error, SystemExit):
            what = "the file can't be loaded: it leaves before its end (sys.exit)"
        where = f"{path.name}:{line}" if line else ""
        self.judged.clear()
        for exercise in exercises:
            verdict = Verdict(exercise.number, exercise.function, SKIPPED, what, where)
            self.tell(verdict=dataclasses.asdict(verdict))
            what = where = ""


class RealWorker(Worker):
    """One of several processes in a process group.  What it prints, virtual ranks have printed."""

    def __init__(self, line: Connection, device: str):
        super().__init__(line, device)
        self.printed = Printed(lambda text: None)

    def join(self) -> None:
        """Join the other ranks, where there are some."""
        self.store = RankStore()
        if "MASTER_PORT" not in os.environ:
            return
        if RANKS_STORE in os.environ:  # rank 0 serves the store where all meet, on the loopback interface
            self.served = dist.TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, True, timedelta(seconds=50),
                wait_for_workers=False, master_listen_fd=int(os.environ[RANKS_STORE]),
            )  # fmt: skip
        join_group(self.device)
        self.store = connect("judge")

    def load(self, command: dict[str, Any]) -> None:
        """Run the file."""
        self.lab, path = load_lab(command["lab"]), Path(command["file"])
        for exercise in self.lab.exercises:
            _ = exercise.check
        sys.path.append(str(path.parent))
        ours = command["solution"]
        names = dict(solutions_of(self.lab.name)) if ours else _names_in(path, command["source"].encode("latin-1"))
        self.bench = Bench(names, RealRank(self.store), self.device, lambda text="": self.tell(note=text))

    def confirm(self, command: dict[str, Any]) -> None:
        """Run the checks of what has passed once more, on real ranks; say what fails."""
        self.load(command)
        for exercise in self.lab.choose(command["only"], "only"):
            # Processes share the cores, and wait for the slowest at each collective.
            self.tell(begin=exercise.number, seconds=exercise.seconds * (1 + self.store.size))
            found = outcome_of(exercise, self.bench)
            if found and found.status != PASSED:
                how = f"right on virtual ranks, but on real processes: {found.finding.symptom}"
                why = found.finding
                verdict = Verdict(
                    exercise.number, exercise.function, found.status, how, found.where, why.cause, why.repair
                )
                self.tell(verdict=dataclasses.asdict(verdict))
                return

    def measure(self, command: dict[str, Any]) -> None:
        """The lab's reward.  A lab of one process has not been there to confirm."""
        if not hasattr(self, "bench"):
            self.load(command)
        b = self.bench
        try:
            from actmem_course.judge.rewards import reward_of  # a second that only this needs

            reward = reward_of(self.lab, b)
        except Exception as error:  # all has passed; a failing measurement must not hide that
            self.tell(reward=None, why=f"no measurement: {type(error).__name__}: {error}")
            return
        if b.rank == 0:
            reward.show(screen(file=sys.__stdout__, highlight=False, emoji=False))
            print(end="", file=sys.__stdout__, flush=True)
        self.tell(reward=dataclasses.asdict(reward), why="")


def _standing(thread: int | None, file: str) -> str:
    """Where a thread is in the learner's file, to follow "rank 1" in a sentence."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    while frame is not None:
        if frame.f_code.co_filename == file:
            return f"is at {file_and_line(frame)}, in {frame.f_code.co_name}"
        frame = frame.f_back
    return "is in none of your functions"


def _state_of_modules() -> dict[Any, dict[str, Any]]:
    """What torch's and the judge's own modules, and the classes that a learner may patch, hold now."""
    modules = [
        m
        for name, m in list(sys.modules.items())
        if name.split(".")[0] in ("actmem", "actmem_more", "actmem_tools", "actmem_course") and m
    ]
    torchs = [torch, torch.nn.functional, torch.nn, torch.distributed, torch.autograd, torch.random]
    owners: list[Any] = [*torchs, *modules]
    owners += [c for m in modules for c in vars(m).values() if isinstance(c, type) and c.__module__ == m.__name__]
    return {owner: dict(vars(owner)) for owner in [*owners, torch.Tensor, torch.autograd.Function]}


def _restore(before: dict[Any, dict[str, Any]]) -> None:
    """Undo what a learner's code did to modules and to settings of the whole process."""
    for owner, names in before.items():
        now = vars(owner)
        for name, value in names.items():
            if now.get(name) is not value and not name.startswith("__"):
                setattr(owner, name, value)
    torch.set_default_dtype(torch.float32)


def _forget_modules_beside(path: Path) -> bool:
    """Let the file import what lies beside it, after everything else; whether it has, in which case it is read anew."""
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    beside = _modules_beside(path)
    for name in beside:
        del sys.modules[name]
    return bool(beside)


def _modules_beside(path: Path) -> list[str]:
    """What is loaded from the folder of a file."""
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return [name for name, file in files.items() if file.startswith(str(path.parent) + os.sep)]


def _freeze(lab: Lab) -> None:
    """Load the lab's checks, and take what is loaded out of the garbage collector's sight.

    To count bytes, a check looks for tensors among all objects that the collector knows: 300,000 of
    them are torch's own, a second at each save.  What a learner's file makes comes after this.
    """
    if gc.get_freeze_count() == 0:
        for exercise in lab.exercises:
            _ = exercise.check
        gc.collect()
        gc.freeze()


def _names_in(path: Path, source: bytes) -> dict:
    """The names of a learner's file, run afresh.  It may read otherwise by now: tracebacks show ``source``."""
    code = compile(source, str(path), "exec")
    if any(name.startswith("actmem_course.judge.solutions") for name in _imports(source)):
        raise ValueError("it imports our own solutions: write the functions yourself")
    linecache.cache[str(path)] = len(source), None, decode_source(source).splitlines(keepends=True), str(path)
    names = {"__name__": "learner", "__file__": str(path)}
    exec(code, names)
    return names


def _imports(source: bytes) -> set[str]:
    """All that a file imports, by its full name."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            package = f"{getattr(node, 'module', None) or ''}."
            found |= {f"{package}{alias.name}".lstrip(".") for alias in node.names}
    return found


def _texts(source: bytes) -> dict[str, str]:
    """The statements that give each name of a file its value, without their comments and places."""
    texts: dict[str, str] = {}
    for statement in ast.parse(source).body:
        for node in [statement] if hasattr(statement, "name") else ast.walk(statement):
            own = str(getattr(node, "asname", None) or getattr(node, "name", None) or getattr(node, "id", ""))
            texts[own] = texts.get(own, "") + ast.dump(statement)
    return texts


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it, and ends its ranks
    faulthandler.enable(int(os.environ[CRASHES]))
    os._exit = sys.exit  # type: ignore[assignment]  # else a learner's os._exit(0) ends with 0 and no verdict
    sys.breakpointhook = pdb.set_trace = _no_debugger
    warnings.showwarning = _warn
    # torch 2.13 has new names for two collectives; the old ones are right, and the only ones before it.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated. Please use .*_single")
    for stream in (sys.stdout, sys.stderr):
        # Ranks share the screen, and PYTHONUNBUFFERED would mix the parts of their lines.
        stream.reconfigure(errors="replace", line_buffering=True, write_through=False)  # type: ignore[union-attr]
    line, device = Connection(int(os.environ[RANKS_LINE])), os.environ["ACTMEM_DEVICE"]
    worker = VirtualWorker(line, device) if VIRTUAL in os.environ else RealWorker(line, device)
    threading.Thread(target=worker.listen, name="line", daemon=True).start()
    if isinstance(worker, RealWorker):
        worker.join()
    else:
        torch.set_num_threads(1)
        worker.warm_up()
    worker.tell(ready=True)
    try:
        worker.run()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.__stderr__, flush=True)
        _leave(1)


def _no_debugger(*args, **kwargs):
    raise RuntimeError(
        "no debugger can be used here, where nobody types: print, or call the function in a Python of your own"
    )


def _warn(message, category, filename, lineno, file=None, line=None):
    """A warning of torch's is nothing that a learner prints."""
    print(warnings.formatwarning(message, category, filename, lineno, line), end="", file=sys.__stderr__)


if __name__ == "__main__":
    main()
