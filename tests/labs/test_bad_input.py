"""Options that don't fit, each refused in one line by every rank before anything runs."""

import pytest
import torch
import torch.distributed as dist

from actmem_course.judge.outline import load_lab
from actmem_course.process import cause_of
from tests.labs.in_process import judge_exit, lab_refusal

#: What each lab refuses on one process, as it is typed, and what its line says.
ALONE = [
    ("measure_gpu.py", "", "--device: there is no GPU that this torch can use; try --device cpu --quick"),
    ("measure_gpu.py", "--device cpu", "--device: a CPU would need days for these layers: add --quick"),
    ("measure_peers.py", "--emulate 2 --rounds 10000000", "--rounds: must be at most"),
    ("measure_pipeline.py", "", "not started by torchrun: run torchrun --nproc-per-node 2 labs/measure_pipeline.py, or python labs/measure_pipeline.py --ranks 2"),
    ("measure_speed.py", "--emulate 1 --model 1T", "model shape: 1 ranks need about "),
    ("measure_speed.py", "--emulate 2 --trace /proc/x/y", "--trace: cannot write /proc/x/y"),
    ("measure_table2.py", "--emulate 2 --ranks 2", "--emulate: needs a single process"),
    ("measure_table2.py", "--emulate 1 --seq-length 1073741824 --num-attention-heads 256", "one tensor would have"),
    ("measure_table2.py", "--emulate 2 --json /proc/actmem/x.json", "--json: cannot write /proc/actmem/x.json"),
    ("measure_table2.py", "--emulate 2 --device cuda", "--device: torch finds no CUDA GPU here"),
    ("measure_today.py", "--emulate 2 --context 4", "--context: must be at most 2, got 4"),
    ("measure_today.py", "--emulate 9 --context 6 --seq-length 24", "--context: must divide the number of ranks, 9"),
    (
        "measure_today.py",
        "--emulate 2 --model deepseek-v3-dense --num-attention-heads 64",
        "--num-key-value-heads: latent attention has a key for each of 64 query heads, got 128",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("script", "typed", "expected"), ALONE, ids=lambda value: value[:60])
def test_bad_input_is_one_line_and_exit_code_2(script, typed, expected, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert expected in lab_refusal(script, typed.split(), monkeypatch, capsys)


#: The same on two ranks: rank 0 says it.  Where a number of GPUs is given, so many are here.
ON_TWO_RANKS = [
    ("measure_paper.py", "", "started by torchrun: needs a single process: python labs/measure_paper.py"),
    ("measure_parity.py", "--num-attention-heads 1", "--num-attention-heads: 1 must be divisible by tensor_parallel_size = 2"),
    ("measure_parity.py", "--model 22B", "model shape: too large for a comparison in float64"),
    ("measure_pipeline.py", "--pipeline 3", "--pipeline: "),
    ("measure_pipeline.py", "--pipeline 4", "p · t = 4 · 1 = 4 ranks wanted, 2 started"),
    ("measure_pipeline.py", "--microbatches 1000000000", "--microbatches: the schedule would list 2,000,000,000 forward passes, at most 250,000"),
    ("measure_pipeline.py", "--chunks 2 --free-outputs", "--free-outputs: "),
    ("measure_pipeline.py", "--device cpu --model 1T", "model shape: 2 ranks need about "),
    ("measure_speed.py", "--device cpu --json {file} --trace {file}", "is the file of --json already"),
    ("measure_table2.py", "--ranks 2", "--ranks: torchrun has started the ranks"),
    ("measure_table2.py", "--device cpu --model 1T --seq-length 65536", "use --emulate"),
    ("measure_table2.py", "--emulate 2", "--emulate: needs a single process"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "typed", "expected"), ON_TWO_RANKS, ids=lambda value: value[:60])
def test_bad_input_of_ranks_is_said_once_by_rank_0(script, typed, expected, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = typed.format(file=tmp_path / "file").split()
    assert expected in lab_refusal(script, arguments, monkeypatch, capsys, ranks=2)


NUMBERS = ", ".join(exercise.number for exercise in load_lab("lab3_sequence_parallel").exercises)
JUDGED = {
    "--hint ": "--hint: ",
    "--hint 4": f"--hint: must be one of {NUMBERS}, got 4",
    "--json /proc/x/y": "--json: cannot write /proc/x/y",
    "--only ": "--only: ",
    "--only 9.9": f"--only: must be one of {NUMBERS}, got 9.9",
    "--solution --ranks 0": "--ranks: ",
}


@pytest.mark.parametrize("typed", JUDGED)
def test_judged_labs(typed, monkeypatch, capsys, tmp_path):
    arguments = typed.format(file=tmp_path / "file").split(" ")
    code, out, (line,) = judge_exit("lab3_sequence_parallel", arguments, monkeypatch, capsys)
    assert (code, out) == (2, "") and line.startswith(f"lab3_sequence_parallel.py: {JUDGED[typed]}")


def test_an_error_is_one_line():
    with pytest.raises(RuntimeError) as no_memory:
        torch.empty(2**60, dtype=torch.uint8)
    assert cause_of(no_memory.value).startswith("out of memory: err == 0. DefaultCPUAllocator: can't allocate memory")
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has")
    assert cause_of(memory) == f"out of memory: {memory}"
    assert cause_of(MemoryError()) == "out of memory"
    nccl, last = "NCCL error in: /x/NCCLUtils.cpp:94, unhandled system error", "Error while creating shared memory"
    assert (
        cause_of(dist.DistBackendError(f"{nccl}\nncclSystemError: failed.\nLast error:\n{last}")) == f"{nccl}: {last}"
    )
    assert cause_of(OSError(28, "No space left on device", "a.json")) == "cannot write a.json: No space left on device"
    assert cause_of(ValueError("one\ntwo")) == "ValueError: one"
    refused = ConnectionRefusedError(111, "Connection refused")
    assert cause_of(refused) == "ConnectionRefusedError: [Errno 111] Connection refused"
