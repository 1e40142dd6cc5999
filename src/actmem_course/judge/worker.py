"""A rank of the judge: ``python -m actmem_course.judge.worker``, started by the parent, which tells it what to judge.

It loads the learner's file, judges, and says on its line what it is doing.  It watches nobody: the
parent sees whether it lives, how long it takes, and where it stands.
"""

from __future__ import annotations

import ast
import dataclasses
import faulthandler
import gc
import json
import linecache
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from importlib.util import decode_source
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from actmem.measure.comms import count_collectives
from actmem_course.files import replacing
from actmem_course.judge.catalogue import load_lab, solutions_of
from actmem_course.judge.exercise import Exercise, Lab
from actmem_course.judge.judging import judge, names_used_by
from actmem_course.judge.parent import RANKS_LINE, RANKS_STORE, RANKS_TRACE
from actmem_course.judge.verdict import ERROR, PASSED, Verdict
from actmem_course.judge.workbench import Bench
from actmem_course.process import lab_console
from actmem_course.rank_store import RankStore, connect
from actmem_course.ranks import TIMEOUT, stay_on_this_host

_leave = os._exit  # a learner's code meets another one


class Worker:
    """This rank, and what it remembers between two judgements of a file."""

    def __init__(self, line: Connection, device: str):
        self.line, self.device = line, device
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self.store = RankStore()
        #: What each exercise's function and all it uses read when it was judged, and the verdict.
        self.judged: dict[str, tuple[list[str], Verdict]] = {}
        self.reads: dict[str, list[str]] = {}

    def tell(self, **message: Any) -> None:
        """Say something to the parent."""
        self.line.send_bytes(json.dumps(message, ensure_ascii=False).encode())

    def listen(self) -> None:
        """Take the parent's commands; end with it.  Runs in a thread of its own."""
        with suppress(EOFError, OSError):
            while True:
                self.commands.put(json.loads(self.line.recv_bytes()))
        _leave(0)

    def join(self) -> None:
        """Join the other ranks, where there are some."""
        size = int(os.environ["WORLD_SIZE"])
        if "MASTER_PORT" not in os.environ:
            return
        if RANKS_STORE in os.environ:  # rank 0 serves the store where all meet, on the loopback interface
            self.served = dist.TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, True, timedelta(seconds=50),
                wait_for_workers=False, master_listen_fd=int(os.environ[RANKS_STORE]),
            )  # fmt: skip
        if self.device == "cuda":
            gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(gpu)
            dist.init_process_group("nccl", device_id=gpu, timeout=TIMEOUT)
        else:
            stay_on_this_host()
            dist.init_process_group("gloo", timeout=TIMEOUT)
        assert dist.get_world_size() == size
        self.store = connect("judge")

    def warm_up(self) -> None:
        """Load what torch loads when it first sees an operation: seconds that are no learner's."""
        with count_collectives():
            x = torch.ones(2, device=self.device, requires_grad=True)
            (x * 1).sum().backward()
            if self.store.size > 1:
                dist.all_reduce(x.detach().clone())

    def run(self) -> None:
        """Judge whenever the parent asks."""
        while True:
            command = self.commands.get()
            if command["do"] == "judge":
                self._judge(command)
            else:
                self._measure(command)
            sys.stdout.flush()
            self.tell(done=command["do"])

    def _bench(self, functions: dict) -> Bench:
        b = Bench(functions, self.store, self.device)
        b.place.on_collective = lambda kind: self.tell(waits_in=kind)
        b.progress = lambda text="": self.tell(note=text)
        return b

    def _judge(self, command: dict[str, Any]) -> None:
        lab, path, source = load_lab(command["lab"]), Path(command["file"]), command["source"].encode("latin-1")
        exercises = lab.choose(command["only"], "only")
        _freeze(lab)
        try:
            functions = solutions_of(lab.name) if command["solution"] else _names_in(path, source)
        except Exception as error:
            self.reads = {}
            for exercise in exercises:
                self._say(_unloadable(exercise, path, error))
            return
        self.bench, self.lab = self._bench(functions), lab
        texts = {} if command["solution"] else _texts(source)
        passed: set[str] = set()
        for exercise in exercises:
            if self._is_new(exercise, functions, texts) or not command["changed_only"]:
                judge(lab, [exercise], self.bench, self._begin, self._say, passed)
                continue
            verdict = self.judged[exercise.number][1]
            if verdict.status == PASSED:
                passed.add(exercise.function)
            self._say(verdict)

    def _begin(self, exercise: Exercise) -> None:
        self.tell(begin=exercise.number, seconds=exercise.seconds)

    def _is_new(self, exercise: Exercise, functions: dict, texts: dict[str, str]) -> bool:
        """Whether a function, or something of the file that it uses, reads otherwise than when it was judged."""
        used = sorted({exercise.function, *names_used_by(functions.get(exercise.function), functions)})
        self.reads[exercise.number] = [texts.get(name, "") for name in used]
        before = self.judged.get(exercise.number)
        return before is None or before[0] != self.reads[exercise.number]

    def _say(self, verdict: Verdict) -> None:
        self.judged[verdict.exercise] = (self.reads.get(verdict.exercise, []), verdict)
        sys.stdout.flush()
        self.tell(verdict=dataclasses.asdict(verdict))

    def _measure(self, command: dict[str, Any]) -> None:
        b = self.bench
        b.start()
        try:
            reward = self.lab.reward(b)
        except Exception as error:  # all has passed; a failing measurement must not hide that
            b.in_step.stop()
            self.tell(reward=None, why=f"no measurement: {type(error).__name__}: {error}")
            return
        finally:
            b.in_step.stop()
        if b.rank == 0:
            reward.show(lab_console(highlight=False, emoji=False))
            if command["html"]:
                with replacing(Path(command["html"])) as beside:
                    reward.write_html(beside)
        self.tell(reward=dataclasses.asdict(reward), why="")


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
    linecache.cache[str(path)] = len(source), None, decode_source(source).splitlines(keepends=True), str(path)
    names = {"__name__": "learner", "__file__": str(path)}
    exec(code, names)
    return names


def _unloadable(exercise: Exercise, path: Path, error: Exception) -> Verdict:
    line = error.lineno if isinstance(error, SyntaxError) else None
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    line = line or (own[-1].lineno if own else None)
    what = f"the file can't be loaded: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return Verdict(exercise.number, exercise.function, ERROR, what, f"{path.name}:{line}" if line else "")


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
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=int(os.environ[RANKS_TRACE]), all_threads=False)
    os._exit = sys.exit  # type: ignore[assignment]  # else a learner's os._exit(0) ends with 0 and no verdict
    # torch 2.13 has new names for two collectives; the old ones are right, and the only ones before it.
    warnings.filterwarnings("ignore", category=FutureWarning, message=".*is deprecated. Please use .*_single")
    for stream in (sys.stdout, sys.stderr):
        # Ranks share the screen, and PYTHONUNBUFFERED would mix the parts of their lines.
        stream.reconfigure(errors="replace", line_buffering=True, write_through=False)  # type: ignore[union-attr]
    worker = Worker(Connection(int(os.environ[RANKS_LINE])), os.environ["ACTMEM_DEVICE"])
    threading.Thread(target=worker.listen, name="line", daemon=True).start()
    worker.join()
    worker.warm_up()
    worker.tell(ready=True)
    try:
        worker.run()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        _leave(1)


if __name__ == "__main__":
    main()
