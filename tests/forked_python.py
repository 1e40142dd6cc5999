"""A Python whose processes are forked from one that has loaded torch: loading it anew takes four seconds of a core.

``forked_python`` gives a program that takes Python's place in ``sys.executable``.  It is a process as any other: its
streams, variables, signals, exit code and its own children are those that it was started with.  What it runs is forked
by a server that has loaded torch, and nothing of this project.  A command that is no script, or that needs
another environment than the server's, gets the real Python.  So does every test of what becomes of processes whose
parent is killed (tests/labs/test_faults.py): there the parent must be the parent.
"""

import json
import os
import signal
import socket
import sys
import types
from functools import cache

#: What the interpreter or torch reads while it loads: it can't change after that.
READ_AT_START = (
    "PYTHON", "LC_", "LANG", "OMP_NUM_THREADS", "LD_", "MKL_", "MALLOC_", "KMP_", "STANDIN_GPUS", "STANDIN_BYTES",
)  # fmt: skip
LOADED = (
    "torch.distributed.nn.functional",
    "torch.distributed.run",
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "torch.testing._internal.distributed.fake_pg",
    "rich.console",
    "rich.progress",
    "rich.table",
)
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
LARGEST_REQUEST, MOST_FILES = 1 << 20, 64


def read_at_start(environment) -> dict[str, str]:
    kept = {name: value for name, value in environment.items() if name.startswith(READ_AT_START)}
    for given_on in ("PYTHONUNBUFFERED", "PYTHONPATH"):
        kept.pop(given_on, None)
    return kept


# the program: a few milliseconds, and a process that stands for the forked one


def stand_in(python: str, address: str, command: list[str]) -> None:
    """Have the server run a command, and end as it ends; or become the real Python."""
    unbuffered = command[:1] == ["-u"] or bool(os.environ.get("PYTHONUNBUFFERED"))
    words = command[command[:1] == ["-u"] :]
    server = socket.socket(socket.AF_UNIX)
    forked: list[int] = []  # its number, once it is known
    early: list[int] = []

    def forward(number, frame):
        try:
            os.kill(forked[0], number) if forked else early.append(number)
        except ProcessLookupError:  # it has ended, and this one is about to
            pass

    for number in FORWARDED:
        signal.signal(number, forward)
    try:
        script = words[:1] and (words[0] == "-c" or words[0].endswith(".py"))
        if not (script or words[:2] == ["-m", "torch.distributed.run"]):
            raise ConnectionError
        files = [int(name) for name in os.listdir("/proc/self/fd") if int(name) != server.fileno() and _is_open(name)]
        server.connect(address)
        request = {"words": words, "unbuffered": unbuffered, "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(server, [json.dumps({**request, "files": files}).encode() + b"\n"], files)
        answers = server.makefile()
        answer = json.loads(answers.readline())
        if answer is None:
            raise ConnectionError
    except (OSError, ValueError):
        for number in FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        for early_one in early:
            os.kill(os.getpid(), early_one)
        os.execv(python, [python, *command])
    forked.append(answer)
    for early_one in early:
        os.kill(answer, early_one)
    # Python forwards a signal that comes just before the system call below only once the call is over: it is woken.
    signal.signal(signal.SIGALRM, lambda number, frame: None)
    signal.setitimer(signal.ITIMER_REAL, 0.2, 0.2)
    ended = answers.readline()
    status = json.loads(ended) if ended else signal.SIGKILL  # the server is gone, and the process with it
    if os.WIFSIGNALED(status):
        end = os.WTERMSIG(status)
        if end != signal.SIGKILL:
            signal.signal(end, signal.SIG_DFL)
        os.kill(os.getpid(), end)
    os._exit(os.waitstatus_to_exitcode(status))


def _is_open(number: str) -> bool:
    try:
        os.fstat(int(number))
        return True
    except OSError:
        return False


# the server


def serve(address: str) -> dict:
    """Fork a process for each request.  Returns, in that process, what it is to run."""
    import select
    import time

    here, parent = read_at_start(os.environ), os.getppid()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address + ".new")
    listener.listen(64)
    os.rename(address + ".new", address)
    running: dict[socket.socket, int] = {}
    while os.getppid() == parent:
        ready, _, _ = select.select([listener, *running], [], [], 0.02 if running else 1)
        for line in set(ready) & running.keys():  # the program that stood for it is gone
            os.kill(running[line], signal.SIGKILL)
            time.sleep(0.01)
        for line, number in list(running.items()):
            ended, status = os.waitpid(number, os.WNOHANG)
            if ended:
                _answer(line, status)
                line.close()
                del running[line]
        if listener in ready:
            line, _ = listener.accept()
            text, files, _, _ = socket.recv_fds(line, LARGEST_REQUEST, MOST_FILES)
            while text and not text.endswith(b"\n"):
                text += line.recv(LARGEST_REQUEST)
            request = json.loads(text or b'{"environment": {}}')
            fits = read_at_start(request["environment"]) == here
            number = os.fork() if fits else None
            if number == 0:
                return {**request, "received": files}
            for file in files:
                os.close(file)
            _answer(line, number)
            if fits:
                running[line] = number
            else:
                line.close()
    for number in running.values():
        os.kill(number, signal.SIGKILL)
    os._exit(0)


def _answer(line: socket.socket, value) -> None:
    try:
        line.sendall(json.dumps(value).encode() + b"\n")
    except OSError:
        pass  # nobody waits any more


def become(request: dict, python: str) -> None:
    """Turn this process into the one that was asked for."""
    import fcntl

    os.setsid()
    kept = [fcntl.fcntl(file, fcntl.F_DUPFD, 500) for file in request["received"]]
    for name in os.listdir("/proc/self/fd"):
        if int(name) < 500 and _is_open(name):
            os.close(int(name))
    for file, number in zip(kept, request["files"], strict=True):
        os.dup2(file, number)
        os.close(file)
    mine, theirs = (
        [path for path in variables.get("PYTHONPATH", "").split(os.pathsep) if path]
        for variables in (os.environ, request["environment"])
    )
    sys.path[:] = theirs + [path for path in sys.path if path not in mine]
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.executable = python
    for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        there = number in request["files"]
        setattr(sys, name, _stream(number, mode, request["unbuffered"]) if there else None)
        setattr(sys, f"__{name}__", getattr(sys, name))


def _stream(number: int, mode: str, unbuffered: bool):
    import io

    raw = io.FileIO(number, mode, closefd=False)
    if mode == "r":
        return io.TextIOWrapper(io.BufferedReader(raw))
    errors = "backslashreplace" if number == 2 else "strict"
    lines = number == 2 or raw.isatty()
    return io.TextIOWrapper(io.BufferedWriter(raw), errors=errors, line_buffering=lines, write_through=unbuffered)


def run(words: list[str]) -> None:
    """Run a script or torchrun, as if this process had begun with it."""
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(words[1], main.__dict__)
        return
    if words[0] == "-m":
        import runpy

        sys.argv = [words[1], *words[2:]]
        sys.path.insert(0, os.getcwd())
        del sys.modules[words[1]]  # runpy warns of one that is loaded already
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    path = os.path.abspath(words[0])
    sys.argv = words
    sys.path.insert(0, os.path.dirname(path))
    main = types.ModuleType("__main__")
    main.__file__ = path
    sys.modules["__main__"] = main
    with open(path, "rb") as file:
        exec(compile(file.read(), path, "exec"), main.__dict__)


# for tests


class ForkedPython:
    """path: of the program.  It serves until ``stop``, or until this process ends.  Its commands have these variables."""

    def __init__(self, folder, variables=os.environ):
        import shlex
        import subprocess
        import time

        self.path, address = str(folder / "python"), str(folder / "server")
        with open(self.path, "w", encoding="utf-8") as file:
            words = " ".join(map(shlex.quote, (sys.executable, "-IS", __file__, "stand in", sys.executable, address)))
            file.write(f'#!/bin/sh\nexec {words} "$@"\n')
        os.chmod(self.path, 0o755)
        environment = {**variables, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [sys.executable, __file__, "serve", self.path, address]
        self._server = subprocess.Popen(
            command, env=environment, text=True, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        while not os.path.exists(address):
            assert self._server.poll() is None, self._server.stderr.read()
            time.sleep(0.05)

    def stop(self):
        self._server.kill()
        self._server.wait()
        self._server.stderr.close()


@cache
def shared() -> str:
    """The path of a program that serves until this process ends."""
    import atexit
    import shutil
    import tempfile
    from pathlib import Path

    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    python = ForkedPython(folder)
    atexit.register(python.stop)
    return python.path


if __name__ == "__main__":
    if sys.argv[1] == "stand in":
        stand_in(sys.argv[2], sys.argv[3], sys.argv[4:])
    import contextlib
    import gc
    import importlib

    del sys.path[0]  # the folder of this file
    for module in LOADED:
        with contextlib.suppress(ImportError):  # torch's own parts, which another version may not have
            importlib.import_module(module)
    gc.freeze()  # pages that no collection touches stay shared
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads must not fork"
    asked = serve(sys.argv[3])
    become(asked, sys.argv[2])
    # Whatever ends it, ends it as a Python of its own: nothing is caught here.
    run(asked["words"])
