"""Run a lab's ``main`` in this process, for cases that end before there is a process group."""

import importlib.util
import sys

import pytest

from actmem_course.launch import LABS


def lab_exit(script, arguments, monkeypatch, capsys, **environment):
    """Exit code, standard output and lines of standard error of a lab that stops early."""
    spec = importlib.util.spec_from_file_location("lab_under_test", LABS / script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    output = capsys.readouterr()
    return stopped.value.code, output.out, output.err.splitlines()


def judge_exit(name, arguments, monkeypatch, capsys, **environment):
    """The same of a lab that is judged: of the learner's file, without its answers."""
    from actmem_course.judge.command import main

    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, str(value))
    path = LABS / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main({"__file__": str(path), "__doc__": "A lab."})
    output = capsys.readouterr()
    return stopped.value.code, output.out, output.err.splitlines()
