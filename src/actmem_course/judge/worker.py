"""The judge's process: it judges the files that its parent (``judge.parent``) names.

It runs the learner's file once for each virtual rank (a thread that acts as a rank), judges its exercises, and sends
messages to the parent through a pipe.  The parent watches the process: it notices if the process dies or takes too
long, and asks at which line the learner's code is.
"""

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
from importlib.util import decode_source
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from actmem.ledger.comms import count_collectives
from actmem_course.judge.exercise import Exercise
from actmem_course.judge.judging import Judge
from actmem_course.judge.outline import load_lab
from actmem_course.judge.parent import CRASHES, LINE
from actmem_course.judge.printed import Printed
from actmem_course.judge.verdict import SKIPPED, Verdict
from actmem_course.judge.virtual import file_and_line, innermost

_leave = os._exit  # main puts another function in its place, for learners' code


class Worker:
    """Judges whenever the parent asks, and remembers verdicts, so that unchanged exercises aren't judged again.

    Args:
        line: the end of the pipe through which this process and its parent send each other messages.
    """

    def __init__(self, line: Connection):
        self.line = line
        self.printed = Printed(lambda text: self.tell(printed=text))
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self.judging: Judge | None = None
        #: By exercise's number: the texts of its function and of all that it uses when it was judged, and the verdict.
        self.judged: dict[str, tuple[list[str], Verdict]] = {}

    def tell(self, **message: Any) -> None:
        """Send the parent a message.

        Args:
            message: the message's keys and values, which JSON can hold: printed="a line".
        """
        self.line.send_bytes(json.dumps(message, ensure_ascii=False).encode())

    def listen(self) -> None:
        """Receive the parent's commands in a thread of its own; end this process when the parent has ended."""
        with suppress(EOFError, OSError):
            while True:
                command = json.loads(self.line.recv_bytes())
                if command["do"] == "where":
                    where, seconds = self.where(command["file"])
                    self.tell(where=where, in_call=seconds)
                else:
                    self.commands.put(command)
        _leave(0)

    def where(self, file: str) -> tuple[str, float]:
        """Find out what the learner's code is executing now.

        Args:
            file: the learner's file.

        Returns: a text that names the place ("rank 1 is at lab2.py:30, in mlp"); and for how many seconds the case's
            latest call of a learner's function has been running (infinite if it is the case's first call).
        """
        rank = self.judging and self.judging.running
        if not rank:
            return "it is in none of your functions", 0.0
        in_call = time.monotonic() - rank.call_began if rank.calls > 1 else math.inf
        return f"rank {rank.number} {_standing(rank.thread, file)}", in_call

    def run(self) -> None:
        """Wait for the parent's commands and judge, in an endless loop."""
        while True:
            command = self.commands.get()
            with redirect_stdout(self.printed), redirect_stderr(self.printed):
                self.judge(command)
            self.tell(done=True)

    def warm_up(self) -> None:
        """Run torch's first operations, which are slow, so that their time isn't counted as the learner's."""
        torch.set_num_threads(1)
        with count_collectives():
            x = torch.ones(2, requires_grad=True)
            (x * 1).sum().backward()
        gc.freeze()  # a ledger looks for weights among all objects: there are none yet

    def judge(self, command: dict[str, Any]) -> None:
        """Judge a file, and send the parent each verdict.

        Args:
            command: the parent's message, a dict with these keys: "lab", the lab's name; "file", the file's path;
                "source", the file's text; "only", numbers of the exercises to judge, empty for all; "size", how many
                ranks; "changed_only", whether an exercise whose text hasn't changed keeps its verdict.  Two more keys
                matter if this process replaces one that an answer has ended, and tell what that process found out:
                "passed", names of functions that have passed, so other exercises may call them; and "endless", names of
                functions that ran too long, in whose place other exercises get our solution's.
        """
        lab, path, source = load_lab(command["lab"]), Path(command["file"]), command["source"].encode("latin-1")
        exercises = lab.choose(command["only"], "only")
        size = max(command["size"], lab.fewest_virtual)
        self.judging = judge = Judge(lab, [{}] * size, lambda: self.tell(moves=True))
        judge.passed, judge.endless = set(command.get("passed", ())), set(command.get("endless", ()))
        self.printed.size = size
        judge.spaces = judge.ranks.run(lambda rank: names_in(path, source), str(path))  # each rank runs the file
        self.printed.end()
        for names in judge.spaces:
            if isinstance(names, BaseException):
                self._say_unloadable(exercises, path, names)
                return
        judge.texts = _texts(source)
        for exercise in exercises:
            reads = judge.reads(exercise)
            known = self.judged.get(exercise.number)
            unchanged = bool(command["changed_only"] and known and known[0] == reads)
            if known and unchanged:
                verdict = known[1]
            else:
                self.tell(begin=exercise.number, seconds=exercise.seconds)
                verdict = judge.judge(exercise)
                torch.set_default_dtype(torch.float32)  # a learner's other settings end with the ranks' threads
            judge.know(exercise, verdict)
            self.judged[exercise.number] = reads, verdict
            self.printed.end()
            self.tell(verdict=dataclasses.asdict(verdict), unchanged=unchanged)

    def _say_unloadable(self, exercises: Iterable[Exercise], path: Path, error: BaseException) -> None:
        numbers = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else next(reversed(numbers), None)
        what = f"the file can't be loaded: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
        if isinstance(error, SystemExit):
            what = "the file can't be loaded: it leaves before its end (sys.exit)"
        where = f"{path.name}:{line}" if line else ""
        self.judged.clear()
        for exercise in exercises:
            verdict = Verdict(exercise.number, exercise.function, SKIPPED, what, where)
            self.tell(verdict=dataclasses.asdict(verdict), unchanged=False)
            what = where = ""


def _standing(thread: int | None, file: str) -> str:
    """Say where in the learner's file a thread is, in words that follow "rank 1"."""
    frame = innermost(file, sys._current_frames().get(thread or 0))
    return f"is at {file_and_line(frame)}, in {frame.f_code.co_name}" if frame else "is in none of your functions"


def names_in(path: Path, source: bytes) -> dict:
    """Run a learner's file, and return the names that it defines.

    Args:
        path: the file's path.
        source: the file's contents; tracebacks show these, even if the file has been saved again since.

    Returns: the names with their values.
    """
    code = compile(source, str(path), "exec")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last, so that a file beside it hides no module
    linecache.cache[str(path)] = len(source), None, decode_source(source).splitlines(keepends=True), str(path)
    names = {"__name__": "learner", "__file__": str(path)}
    exec(code, names)
    return names


def _texts(source: bytes) -> dict[str, str]:
    """For each name of a file, the statements that give it its value, as text without comments and line numbers."""
    texts: dict[str, str] = {}
    for statement in ast.parse(source).body:
        for node in [statement] if hasattr(statement, "name") else ast.walk(statement):
            name = str(getattr(node, "asname", None) or getattr(node, "name", None) or getattr(node, "id", ""))
            texts[name] = texts.get(name, "") + ast.dump(statement)
    return texts


def main() -> None:
    """Run the judge's process until its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    faulthandler.enable(int(os.environ[CRASHES]))
    os._exit = sys.exit  # type: ignore[assignment]  # else a learner's os._exit(0) would end this without a verdict
    sys.breakpointhook = pdb.set_trace = _no_debugger
    warnings.simplefilter("ignore")  # torch's, of the judge's own tensors as well
    for stream in (sys.stdout, sys.stderr):
        # Whole lines at a time: ranks share the screen, and PYTHONUNBUFFERED would mix parts of their lines.
        stream.reconfigure(errors="replace", line_buffering=True, write_through=False)  # type: ignore[union-attr]
    worker = Worker(Connection(int(os.environ[LINE])))
    threading.Thread(target=worker.listen, name="line", daemon=True).start()
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


if __name__ == "__main__":
    main()
