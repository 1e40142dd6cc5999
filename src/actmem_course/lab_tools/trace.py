"""Record a profiler trace in which operations have the paper's names: f, f_bar, g, g_bar, core attention recompute.

Functions are wrapped only while a trace is recorded, so the names cost nothing otherwise.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from actmem.layers.attention import CoreAttention, SelfAttention
from actmem.layers.transformer import MLP
from actmem.ledger.storages import replaced
from actmem.parallel import conjugates, linear
from actmem.recompute import around_second_runs
from actmem_course.lab_tools.timing import Work

#: The functions to wrap: owner, name of the function, name of the range in the trace.
_RANGES = (
    (conjugates.FUNCTIONS["f"], "forward", "f"),
    (conjugates.FUNCTIONS["f"], "backward", "f backward: all-reduce"),
    (conjugates.FUNCTIONS["f_bar"], "forward", "f_bar: all-reduce"),
    (conjugates.FUNCTIONS["f_bar"], "backward", "f_bar backward"),
    (conjugates.FUNCTIONS["g"], "forward", "g: all-gather"),
    (conjugates.FUNCTIONS["g"], "backward", "g backward: reduce-scatter"),
    (conjugates.FUNCTIONS["g_bar"], "forward", "g_bar: reduce-scatter"),
    (conjugates.FUNCTIONS["g_bar"], "backward", "g_bar backward: all-gather"),
    # What is only started here overlaps the matmuls.
    (linear, "all_gather", "g: all-gather"),
    (linear, "start_all_gather", "g again for the weight gradient: start all-gather"),
    (linear, "start_reduce_scatter", "g backward: start reduce-scatter"),
    (linear, "start_all_reduce", "f backward: start all-reduce"),
    (SelfAttention, "forward", "attention"),
    (CoreAttention, "forward", "core attention"),
    (MLP, "forward", "MLP"),
)


@contextmanager
def paper_ranges() -> Iterator[None]:
    """Make a context in which the paper's operators appear as named ranges in traces of torch's profiler."""
    with ExitStack() as stack:
        for owner, name, text in _RANGES:
            stack.enter_context(replaced(owner, name, record_function(text)))
        stack.enter_context(around_second_runs(_second_run_range))
        yield


def write_trace(candidates: dict[str, Work], path: Path | None, device: str) -> None:
    """Run one traced step of each candidate, and write a trace that https://ui.perfetto.dev can show.

    An untraced step of each candidate runs before. Every rank must call this function.

    Args:
        candidates: the work of each candidate, by the name that the trace then shows.
        path: the file to write; None on ranks that write no file.
        device: "cpu" or "cuda".
    """
    for work in candidates.values():  # so that one-time work is not part of a step
        work.backward(work.forward())
        work.finish()
    # A torch without CUPTI prints a stack for each operation if it is asked to trace CUDA.
    wanted = {ProfilerActivity.CPU, ProfilerActivity.CUDA} if device == "cuda" else {ProfilerActivity.CPU}
    activities = wanted & supported_activities()
    with paper_ranges(), profile(activities=activities) as recorded:
        for name, work in candidates.items():
            with record_function(name):
                with record_function("forward"):
                    output = work.forward()
                with record_function("backward"):
                    work.backward(output)
            del output
            work.finish()
    if path is not None:
        recorded.export_chrome_trace(str(path))


def hidden_collectives(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Find how much of the time of collectives overlaps with other kernels in a trace.

    Args:
        events: the list under "traceEvents" in a file that ``write_trace`` wrote on a GPU (a CPU's trace has no
            kernels).

    Returns: a dict for each candidate, pass and kind of collective, with these keys:
        "step": the candidate's name.
        "pass": "forward" or "backward".
        "kind": "all-gather", "reduce-scatter" or "all-reduce".
        "ms": the milliseconds of the NCCL kernels of this kind.
        "hidden_ms": the milliseconds of these during which a kernel that isn't NCCL's ran, too.
    """
    kernels = [event for event in events if event.get("cat") == "kernel"]
    others = [(event["ts"], event["ts"] + event["dur"]) for event in kernels if "nccl" not in event["name"].lower()]
    spans = [event for event in events if event.get("cat") == "gpu_user_annotation"]
    passes = sorted((span for span in spans if span["name"] in ("forward", "backward")), key=lambda span: span["ts"])
    times_of: dict[tuple[str, str, str], list[float]] = {}
    for span in passes:
        start, end = span["ts"], span["ts"] + span["dur"]
        step = next((other["name"] for other in spans if other is not span and _holds(other, start)), "step")
        for event in kernels:
            kind = next((kind for kind in _NCCL if kind in event["name"]), "")
            if kind and start <= event["ts"] < end:
                times = times_of.setdefault((step, span["name"], _NCCL[kind]), [0.0, 0.0])
                times[0] += event["dur"] / 1000
                times[1] += _covered(event["ts"], event["ts"] + event["dur"], others) / 1000
    return [
        {"step": step, "pass": name, "kind": kind, "ms": ms, "hidden_ms": hidden}
        for (step, name, kind), (ms, hidden) in times_of.items()
    ]


#: A part of NCCL's kernels' names, and what the kernel runs.
_NCCL = {"AllGather": "all-gather", "ReduceScatter": "reduce-scatter", "AllReduce": "all-reduce"}


def _holds(span: dict[str, Any], moment: float) -> bool:
    """Return whether ``span`` is the range of a whole step that goes on at that moment."""
    return span["name"] not in ("forward", "backward") and span["ts"] <= moment < span["ts"] + span["dur"]


def _covered(start: float, end: float, spans: list[tuple[float, float]]) -> float:
    """Return how much of the time from ``start`` to ``end`` is covered by at least one span."""
    covered, reached = 0.0, start
    for begin, finish in sorted(spans):
        begin, finish = max(begin, reached), min(finish, end)
        if finish > begin:
            covered, reached = covered + finish - begin, finish
    return covered


def _second_run_range(function: Callable) -> record_function:
    what = "core attention" if isinstance(function, CoreAttention) else "layer"
    return record_function(f"{what} recompute")
