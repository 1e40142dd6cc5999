"""The course on GPUs that stand in for real ones: labs, the judge, launches and failures on 1, 2 and 4 of them."""

import itertools
import json
import re
import subprocess
import sys

import pytest

from actmem.config import TINY
from actmem_course.launch import LABS
from actmem_course.strip_solutions import lab_names
from tests.labs.faults import planted
from tests.patience import SECONDS
from tests.standin.gpus import build, environment, why_not
from tests.tiers import at_night

pytestmark = pytest.mark.slow
NUMBERS = (1, 2, 4)


@pytest.fixture(scope="session", autouse=True)
def built():
    """The stand-in."""
    if reason := why_not():
        pytest.skip(reason)
    build()


def run(gpus, script, *arguments, torchrun=False, **settings):
    """A lab's exit code, output and errors where there are so many GPUs; torchrun: with a rank for each."""
    started = "-m torch.distributed.run --standalone --nproc-per-node".split() + [str(gpus)] if torchrun else []
    command = [sys.executable, *started, str(LABS / script), *map(str, arguments)]
    done = subprocess.run(command, env=environment(gpus, **settings), capture_output=True, text=True, timeout=SECONDS)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("lab", "gpus", "kernel", "exercise"),
    [
        ("lab2_tensor_parallel", 2, "flash", "2.5"),
        ("lab7_todays_layer", 2, "flash", "7.1"),
        *map(at_night, itertools.product(lab_names(), NUMBERS, ("flash", "cudnn"), [""])),
    ],
)
def test_solutions_pass_on_any_number_of_gpus(lab, gpus, kernel, exercise):
    options = ("--only", exercise, "--device", "cuda") if exercise else ()
    settings = {"STANDIN_SDPA": kernel, "STANDIN_NCCL_DESTROY": "collective", "OMP_NUM_THREADS": "1"}
    code, output, errors = run(gpus, f"{lab}.py", "--solution", *options, torchrun=True, **settings)
    passed = re.search(r"(\d+) of (\d+) passed", output)
    assert code == 0 and passed and passed[1] == passed[2], output + errors
    assert not exercise or (passed[1], errors) == ("1", "") and "ranks on cuda" in output


MODEL = "--model", "tiny"
TIMED = (*MODEL, "--rounds", 1)
#: What notebooks launch, what ``make measure`` runs, and the rest: a lab, its options, and its ranks.
LAUNCHES = {
    "table 2": ("measure_table2.py", MODEL, 2),
    "parity": ("measure_parity.py", ("--seq-length", 64), 2),
    "collectives": ("measure_communication.py", TIMED, 2),
    "a pipeline": ("measure_pipeline.py", (*MODEL, "--pipeline", 4, "--microbatches", 8, "--free-outputs"), 4),
    "times": ("measure_speed.py", TIMED, 2),
    "today's layer": ("measure_today.py", ("--model", "tiny-llama"), 2),
    "training": ("train.py", ("--mode", "tensor+sequence", "--steps", 2), 2),
}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("launch", "gpus", "kernel"),
    [
        ("table 2", 2, "flash"),
        *map(at_night, itertools.product(LAUNCHES, NUMBERS, ["flash", "cudnn"])),
    ],
)
def test_a_launch_gets_its_ranks_on_any_number_of_gpus(launch, gpus, kernel):
    script, options, ranks = LAUNCHES[launch]
    settings = {"STANDIN_SDPA": kernel, "STANDIN_NCCL_DESTROY": "collective"}
    code, output, errors = run(gpus, script, *options, "--ranks", ranks, **settings)
    assert (code, errors) == (0, ""), output + errors


#: What nothing above runs, with as many ranks as there are GPUs, or in one process.
OTHERS = {
    "make gpus": ("measure_host.py", "--quick"),
    "other layers": ("measure_peers.py", *TIMED),
    "one rank of 8": ("measure_table2.py", "--elementwise", *MODEL, "--emulate", 8, "--device", "cuda"),
    "times of one rank of 8": ("measure_speed.py", *TIMED, "--emulate", 8, "--device", "cuda"),
    "the paper's tables": ("measure_paper.py", "--model", "22B", "--section", "table2"),
    "logged runs": ("measure_runs.py",),
    "all that a GPU can tell": ("measure_gpu.py", "--quick"),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("lab", "gpus"), list(itertools.product(OTHERS, NUMBERS)))
def test_every_other_lab_on_any_number_of_gpus(lab, gpus):
    if lab == "all that a GPU can tell":
        pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    code, output, errors = run(gpus, *OTHERS[lab], STANDIN_NCCL_DESTROY="collective")
    assert (code, errors) == (0, ""), output + errors
    assert "skipped: " not in output, output


@pytest.mark.nightly
def test_an_old_gpu_times_in_float16():
    old = {"STANDIN_CAPABILITY": "7.5"}
    code, output, errors = run(2, "measure_speed.py", *TIMED, **old)
    assert (code, errors) == (0, "") and "2 ranks on Stand-in GPU" in output, output + errors
    assert f"h={TINY.hidden_size} a={TINY.num_attention_heads}, float16" in output, output


@pytest.mark.nightly
@pytest.mark.parametrize("gpus", NUMBERS)
@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (("--card", 2), 1, r"out of memory in building the model: tried to allocate .*, .* in use, 2 GiB allowed"),
        (("--ranks", 64, "--tensor", "--sequence"), 0, r"allocated at most +0\.74 GiB"),
    ],
)
def test_fit_trains_under_a_gpus_limit(options, code, said, gpus):
    found, output, errors = run(gpus, "fit.py", "--layers", 1, *options)
    assert (found, errors) == (code, "") and re.search(said, output), output + errors


OFFLOADS = """
import os
import torch
from actmem.config import ModelShape
from actmem.formulas.activations import layer_rows
from actmem.layers.gpt import GPT
from actmem.recipes import PAPER_LAYER
from actmem.rows import on_host, total
from actmem_more.store import HostMemory

shape = ModelShape(seq_length=16, micro_batch_size=2, hidden_size=32, num_attention_heads=4, num_layers=4, vocab_size=64)
actions = {"GeLU input": "offload", "4h→h input": "offload", "MLP dropout mask": "offload"}

def step(recompute):
    model = GPT(shape, recompute=recompute, stores={"offload": HostMemory(2)}, seed=3, device="cuda")
    tokens = torch.zeros(2, 16, dtype=torch.long, device="cuda")
    before = torch.cuda.memory_allocated()
    loss = model.loss(model(tokens), tokens)
    held = torch.cuda.memory_allocated() - before
    loss.backward()
    return held, [parameter.grad.cpu() for parameter in model.parameters()]

(held, plain), (left, gradients) = step("none"), step(actions)
assert held - left == 4 * total(on_host(layer_rows(shape, element_size=4), PAPER_LAYER, actions)), (held, left)
assert all(torch.equal(one, other) for one, other in zip(plain, gradients, strict=True))
print("exact", flush=True)
os._exit(0)  # at a usual end torch may abort: the stand-in's backward thread is still there
"""


def test_terms_on_the_host_leave_the_gpu():
    command = [sys.executable, "-c", OFFLOADS]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True, timeout=SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "exact\n", "")


NCCL = """NCCL error in: /x/NCCLUtils.cpp:94, unhandled system error (run with NCCL_DEBUG=INFO for details), NCCL version 2.27.5
ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.
Last error:
Error while creating shared memory segment /dev/shm/nccl-4t5gQb (size 9637888)"""
#: NCCL's first line and its last.
NCCL_SAID = f"{NCCL.splitlines()[0]}: {NCCL.splitlines()[-1]}"
MEMORY_SAID = r"out of memory: .*"
#: Variables of the stand-in, a fault planted on rank 1 only, and what is said.
FAILURES = {
    "one rank": ({}, "raises", r"rank 1: ValueError: planted \(measure_parity.py:\d+; .*\)"),
    "memory everywhere": ({"STANDIN_BYTES": "100000"}, None, f"rank [01]: {MEMORY_SAID}"),
    "one at start-up": ({"STANDIN_NCCL_FAILS": NCCL, "STANDIN_NCCL_FAILS_ON": "1"}, None, f"rank 1: {re.escape(NCCL_SAID)}"),
    "all at start-up": ({"STANDIN_NCCL_FAILS": NCCL}, None, f"rank [01]: {re.escape(NCCL_SAID)}"),
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_is_one_line_though_a_groups_end_waits_for_all(failure, tmp_path):
    settings, fault, said = FAILURES[failure]
    settings = environment(2, STANDIN_NCCL_DESTROY="collective", **settings)
    run = planted(tmp_path, fault or "is well", **settings)
    code, output, errors = run.end()
    assert code == 1 and len(errors) == 1 and re.fullmatch(f"measure_parity.py: {said}", errors[0]), errors
    assert run.nothing_is_left()


def losses_of_a_training(device, path):
    """Of two ranks, on stand-in GPUs or on CPUs."""
    options = ("--dtype", "float64", "--dropout", 0, "--device", device, "--json", path)
    code, output, errors = run(2, "train.py", "--ranks", 2, "--steps", 6, *options)
    assert code == 0, output + errors
    return json.loads(path.read_text())


@pytest.mark.nightly
def test_a_training_is_the_same_on_gpus_and_cpus(tmp_path):
    path = tmp_path / "losses.json"
    # Kernels add in another order.
    assert losses_of_a_training("cuda", path) == pytest.approx(losses_of_a_training("cpu", path), rel=1e-12)
