"""Options that don't fit, each refused in one line by every rank before anything runs."""

from typing import Any

import pytest

from actmem_course.process import cause_of
from tests.labs.in_process import judge_exit, lab_exit

TWO = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2}
MEASURED: dict[str, Any] = {
    "no such number of microbatches": (
        "measure_pipeline.py",
        ["--microbatches", 10**9],
        "--microbatches: the schedule would list 2,000,000,000 forward passes, at most 250,000",
    ),
    "more memory than there is": ("measure_pipeline.py", ["--model", "1T"], "model shape: 2 ranks need about "),
    "v that t doesn't divide": (
        "measure_pipeline.py",
        ["--pipeline", 1, "--tensor", 2, "--num-layers", 1, "--num-attention-heads", 1],
        "--num-attention-heads: 1 must be divisible by",
    ),
    "one file twice": ("measure_speed.py", ["--json", "{file}", "--html", "{file}"], "is the file of --json already"),
    "ranks, by two": ("measure_table2.py", ["--ranks", 2], "--ranks: torchrun has started the ranks"),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("case", MEASURED)
def test_measuring_labs(case, monkeypatch, capsys, tmp_path):
    script, arguments, expected = MEASURED[case]
    arguments = [str(argument).format(file=tmp_path / "file") for argument in arguments]
    for rank in (0, 1):
        place = {**TWO, "RANK": rank, "LOCAL_RANK": rank}
        code, out, lines = lab_exit(script, ["--device", "cpu", *arguments], monkeypatch, capsys, **place)
        assert (code, out, len(lines)) == ((2, "", 1) if rank == 0 else (0, "", 0))
        assert rank or expected in lines[0] and lines[0].startswith(f"{script}: ")


@pytest.mark.bad_input
def test_ranks_beside_one_emulated_rank(monkeypatch, capsys):
    code, out, (line,) = lab_exit("measure_table2.py", ["--emulate", 2, "--ranks", 2], monkeypatch, capsys)
    assert (code, out) == (2, "") and "--ranks: --emulate needs none: leave one of them out" in line


JUDGED: dict[str, Any] = {
    "an empty hint": (["--hint", ""], "--hint: "),
    "a hint and the solution": (["--hint", "3.1", "--solution"], "--solution: has no effect beside --hint"),
    "a hint and a file": (["--hint", "3.1", "--json", "x.json"], "--json: has no effect beside --hint"),
    "a hint and ranks": (["--hint", "3.1", "--ranks", 4], "--ranks: has no effect beside --hint"),
    "a hint and a choice": (["--hint", "3.1", "--only", "3.2"], "--only: has no effect beside --hint"),
    "one file twice": (["--json", "{file}", "--html", "{file}"], "--html: "),
    "an empty choice": (["--only", ""], "--only: "),
}


@pytest.mark.bad_input
@pytest.mark.parametrize("case", JUDGED)
def test_judged_labs(case, monkeypatch, capsys, tmp_path):
    arguments, expected = JUDGED[case]
    arguments = [str(argument).format(file=tmp_path / "file") for argument in arguments]
    code, out, (line,) = judge_exit("lab3_sequence_parallel", arguments, monkeypatch, capsys)
    assert (code, out) == (2, "") and line.startswith(f"lab3_sequence_parallel.py: {expected}")


def test_an_error_is_one_line():
    allocator = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
    assert cause_of(RuntimeError(f"{allocator}\nC++ stack")) == (
        "out of memory: err == 0. DefaultCPUAllocator: can't allocate memory: you tried"
    )
    assert cause_of(MemoryError()) == "out of memory"
    assert cause_of(OSError(28, "No space left on device", "a.json")) == "cannot write a.json: No space left on device"
    assert cause_of(ValueError("one\ntwo")) == "ValueError: one"
