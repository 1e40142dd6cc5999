"""Run a lab's ``main`` in this process: for what ends before any process group is made."""

import importlib.util
import sys

import pytest

from actmem.lab.launch import LABS


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
