"""The GPU script on a CPU, through the same code, and its GPU-only parts with a stand-in for CUDA."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from actmem_course import launch
from actmem_course.bench import hold, measure_gpu
from actmem_course.bench.measure_gpu import QUICK_LAYERS, Session, claims
from actmem_course.bench.measure_speed import BASELINE, VARIANTS
from actmem_course.bench.race import Work, take_turns
from actmem_course.others.paper import TABLE4
from actmem_course.ranks import Ranks
from actmem_course.results import Overhead, SpeedLine, Table2Result
from tests.labs.in_process import shown_in_80_columns

SCRIPT = "measure_gpu.py"


@pytest.mark.nightly
def test_quick_on_a_cpu(tmp_path):
    path = tmp_path / "results.json"
    done = launch.run(SCRIPT, "--device", "cpu", "--quick", "--output", path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds: every layer holds what its formula says" in done.stdout
    results = json.loads(path.read_text())
    assert {"date", "machine", "settings", "cases", "skipped", "claims", "seconds"} <= set(results)
    assert {"device", "torch", "python", "actmem", "megatron_core"} <= set(results["machine"])
    assert results["skipped"] == [] and len(results["cases"]) == len(QUICK_LAYERS)
    curve = results["curve"]
    assert curve["allocated_bytes"] == [] and max(curve["counted_bytes"]) > curve["counted_bytes"][0] == 0
    for case in results["cases"]:
        assert [len(case[part]) for part in ("table2", "speed")] == [6, 8] and len(case["peers"]) >= 12
        assert all(row["exact"] for row in case["table2"] + case["speed"])


def session(seconds, path=None):
    return Session(Ranks(0, 8, "cpu", True), torch.float32, 2, seconds, path)


def test_a_job_that_fails_is_noted_and_the_next_one_runs(tmp_path):
    path = tmp_path / "results.json"
    run = session(60, path)
    assert run.job("one", lambda: [1 / 0], []) == []
    assert run.job("two", lambda: [2], []) == [2]
    assert json.loads(path.read_text())["skipped"] == [{"job": "one", "reason": "ZeroDivisionError: division by zero"}]
    assert [file.name for file in tmp_path.iterdir()] == ["results.json"]


@pytest.mark.nightly
def test_no_time_at_all_still_ends_with_a_file(tmp_path):
    run = session(0, tmp_path / "results.json")
    results = run.measure(QUICK_LAYERS)
    assert {skip["reason"] for skip in results["skipped"]} == {"no time left"}
    assert results["claims"] == [] and json.loads(run.path.read_text())["cases"][0]["speed"] == []


def line(name, overhead, **changed):
    return SpeedLine(
        name, False, "none", False, 0.2, (0.2, 0.2), 0.3, (0.3, 0.3), 0.0, 0.5, (0.5, 0.5),
        Overhead(overhead, overhead - 0.01, overhead + 0.01, True, 0.0), 0.0, 0.0, None, 1016, 1016, 2000, 1024, **{"requested_bytes": 1000, "finite": True, **changed},
    )  # fmt: skip


def test_claims_say_what_does_not_hold():
    wrong = Table2Result("none", "", 1, 0, 8, 0, 9, 1, exact=False, disagreement="")
    case: dict[str, Any] = {"model": "22B", "seq_length": 2048, "table2": [wrong]}
    case["speed"] = [line("selective + sequence parallel", 0.039), line("full recompute", 0.31)]
    assert [(claim.measured, claim.holds) for claim in claims({"cases": [case]})] == [
        ("2 of 3", False), ("2 of 2", True),
    ]  # fmt: skip
    case["speed"][0] = line("selective + sequence parallel", 0.039, requested_bytes=1512)
    assert claims({"cases": [case]})[1].measured == "1 of 2"


class StandIn:
    """What of torch.cuda the clock and the peak call: a clock of events, and counters of bytes."""

    def __init__(self, monkeypatch, counters=()):
        self.now, self.log, self.counters = 0.0, [], iter(counters)
        outer = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                outer.now += 1
                self.at = outer.now

            def elapsed_time(self, end):
                return 1000 * (end.at - self.at)  # milliseconds

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("wait"))
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda: next(self.counters))
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: self.log.append("reset"))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5000)


def test_cuda_events_and_one_step_ahead(monkeypatch):
    cuda = StandIn(monkeypatch)
    work = Work(*(lambda *_, what=what: cuda.log.append(what) for what in ("forward", "backward", "finish")))
    samples = take_turns({"a": work}, rounds=1, warm_up=0, device="cuda")
    assert cuda.log == ["wait", "forward", "backward", "finish", "forward", "backward", "wait", "finish"]
    assert [(sample.forward_seconds, sample.backward_seconds) for sample in samples["a"]] == [(1.0, 1.0)]


def test_cuda_memory_is_the_allocators(monkeypatch):
    stats = [
        {"allocated_bytes.all.current": a, "requested_bytes.all.current": r}
        for a, r in ((1000, 900), (1000, 900), (2536, 2300), (2536, 2300), (1000, 900))
    ]
    cuda = StandIn(monkeypatch, stats)
    runner = hold.Runner(torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True))
    assert hold._allocated(runner) == (1536, 1400) and hold._allocator_peak(runner) == 4000
    assert cuda.log.count("reset") == 1


def test_machine_of_a_gpu(monkeypatch):
    properties = SimpleNamespace(total_memory=2**37, major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 2))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(measure_gpu, "_output", lambda *command: command[0])
    found = measure_gpu.machine("cuda")
    wanted = {"device": "A GPU", "memory_bytes": 2**37, "compute_capability": "9.0", "driver": "nvidia-smi"}
    assert wanted.items() <= found.items()


WITHOUT = """
import sys
sys.modules.update(dict.fromkeys(("plotly", "IPython", "ipywidgets", "anywidget")))
exec(open(sys.argv[1]).read().partition("RESULTS =")[0])
"""


def test_nothing_of_it_needs_a_notebook_or_plotly():
    """A borrowed GPU often has torch and rich and nothing else."""
    done = subprocess.run([sys.executable, "-c", WITHOUT, launch.LABS / SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


SPEED = "measure_speed.py"
TINY = ["--seq-length", 16, "--micro-batch-size", 1, "--hidden-size", 32, "--num-attention-heads", 4, "--rounds", 2]


def check_lines(lines):
    assert [line["name"] for line in lines] == [variant.name for variant in VARIANTS]
    assert lines[0]["name"] == BASELINE and lines[0]["over"] is None
    for line in lines:
        assert line["held_bytes"] == line["predicted_bytes"] > 0 and line["peak_bytes"] > line["held_bytes"]
        assert line["combined_seconds"] > 0 and line["finite"]
        assert (line["recompute_seconds"] > 0) == (line["recompute"] != "none")
        assert line["backward_seconds"] > line["recompute_seconds"]


def test_every_row_of_table_4_is_there():
    assert [variant.name for variant in VARIANTS if not variant.literal] == list(TABLE4)
    assert {variant.paper_row for variant in VARIANTS} == set(TABLE4)


def test_emulated_with_all_files(tmp_path):
    files = {name: tmp_path / name for name in ("json", "html", "trace")}
    shown = shown_in_80_columns(SPEED, "--emulate", 2, *TINY, *(f"--{name}={path}" for name, path in files.items()))
    check_lines(json.loads(files["json"].read_text()))
    assert "exchanges send nothing here" in " ".join(shown.split()) and "All 8 layers hold" in shown
    assert "Noise: the baseline against itself" in shown
    assert "Full recomputation costs" in files["html"].read_text()
    assert "core attention recompute" in files["trace"].read_text()


def test_under_torchrun():
    check_lines(launch.results(SPEED, *TINY, processes=2))
