"""Run a lab's ``main`` without starting a process: here, or on the ranks of a RankPool."""

import contextlib
import importlib
import io
import json
import os
import sys
import tempfile
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from actmem_course.launch import LABS
from actmem_course.rank_store import connect
from actmem_course.ranks import Ranks


def lab_module(script):
    """A lab as a module; its ``main`` has not run."""
    return importlib.import_module(script.removesuffix(".py"))


def lab_results(pool, script, *arguments):
    """What a lab writes to ``--json`` when the ranks of a pool run it; each of them must end with 0."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        ended = pool.run(_on_this_rank, script, [*map(str, arguments), "--json", str(path)])
        assert [code for code, _ in ended] == [0] * pool.size, ended
        return json.loads(path.read_text(encoding="utf-8"))


@cache
def ranks_of_pool():
    """What ``ranks`` gives a lab, on a rank of a RankPool, which has one connection for all labs."""
    return Ranks(dist.get_rank(), dist.get_world_size(), "cpu", False, connect("gather"))


def _on_this_rank(script, arguments):
    """Exit code and standard output of a lab on one rank.  The process group is there already, and stays."""
    rank, size = dist.get_rank(), dist.get_world_size()
    module = lab_module(script)
    here = ranks_of_pool()
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    os.environ.update({name: str(value) for name, value in place.items()})
    sys.argv, printed = [script, *arguments], io.StringIO()
    torch.manual_seed(1234)  # as ``ranks`` does
    try:
        with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "ranks", lambda args, **options: contextlib.nullcontext(here))
            return module.main.__wrapped__(), printed.getvalue()
    finally:
        for name in place:
            del os.environ[name]


def shown_in_80_columns(script, *arguments):
    """What a lab prints: no line but a file's name is wider, and nothing is cut off."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        code, shown = lab_module(script).main.__wrapped__(), printed.getvalue()
    assert code == 0, shown
    lines = (line for line in shown.splitlines() if not line.startswith("wrote"))
    assert "…" not in shown and all(len(line.rstrip()) <= 80 for line in lines)
    return shown


def lab_exit(script, arguments, monkeypatch, capsys, **environment):
    """Exit code, standard output and lines of standard error of a lab, which may stop early."""
    return _exit_of(lab_module(script).main, script, arguments, monkeypatch, capsys, environment)


def _exit_of(main, script, arguments, monkeypatch, capsys, environment):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    code: int | str | None
    try:
        code = main()
    except SystemExit as stopped:
        code = stopped.code
    output = capsys.readouterr()
    return code, output.out, output.err.splitlines()


def lab_refusal(script, arguments, monkeypatch, capsys, ranks=0):
    """The one line with which a lab refuses its arguments; ranks: under torchrun, where only rank 0 says it."""
    for rank in range(ranks - 1, 0, -1):
        place = {"RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}
        assert lab_exit(script, arguments, monkeypatch, capsys, **place) == (0, "", [])
    place = {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks} if ranks else {}
    code, out, lines = lab_exit(script, arguments, monkeypatch, capsys, **place)
    assert (code, out, len(lines)) == (2, "", 1) and lines[0].startswith(f"{script}: "), lines
    return lines[0]


def judge_exit(name, arguments, monkeypatch, capsys, **environment):
    """The same of a lab that is judged: of the learner's file, without its answers."""
    from actmem_course.judge.command import main

    path = str(LABS / f"{name}.py")
    judged = partial(main, {"__file__": path, "__doc__": "A lab."})
    return _exit_of(judged, path, arguments, monkeypatch, capsys, environment)
