"""A profiler trace with the paper's names on it: f, f_bar, g, g_bar, core attention recompute.

The names are put around the functions only while a trace is recorded, so that they cost nothing
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from actmem import recompute
from actmem.measure.clock import Work
from actmem.measure.replace import replaced
from actmem.model.attention import CoreAttention, SelfAttention
from actmem.model.mlp import MLP
from actmem.parallel import conjugates, linear
from actmem.parallel.rng import DropoutMask, _Drop

#: Where each range is put: owner, name of the function, name of the range.
_RANGES = (
    (conjugates._F, "forward", "f"),
    (conjugates._F, "backward", "f backward: all-reduce"),
    (conjugates._FBar, "forward", "f_bar: all-reduce"),
    (conjugates._FBar, "backward", "f_bar backward"),
    (conjugates._G, "forward", "g: all-gather"),
    (conjugates._G, "backward", "g backward: reduce-scatter"),
    (conjugates._GBar, "forward", "g_bar: reduce-scatter"),
    (conjugates._GBar, "backward", "g_bar backward: all-gather"),
    (linear._GatherInBackward, "forward", "f or g, and linear"),
    (linear._GatherInBackward, "backward", "f or g, and linear: backward"),
    # Inside the two above; what is only started here runs on beside the matrix products.
    (linear, "all_gather", "g: all-gather"),
    (linear, "start_all_gather", "g again for the weight gradient: start all-gather"),
    (linear, "start_reduce_scatter", "g backward: start reduce-scatter"),
    (linear, "start_all_reduce", "f backward: start all-reduce"),
    (SelfAttention, "forward", "attention"),
    (CoreAttention, "forward", "core attention"),
    (MLP, "forward", "MLP"),
    (nn.LayerNorm, "forward", "layer norm"),
    (DropoutMask, "forward", "draw dropout mask"),
    (_Drop, "forward", "dropout"),
    (_Drop, "backward", "dropout backward"),
)


@contextmanager
def paper_ranges() -> Iterator[None]:
    """Put the paper's names on what runs in the block, as ranges of torch's profiler."""
    with ExitStack() as stack:
        for owner, name, text in _RANGES:
            stack.enter_context(replaced(owner, name, _named(text)))
        stack.enter_context(replaced(recompute._Region, "_run_again", _named_second_run))
        yield


def write_trace(candidates: dict[str, Work], path: Path | None, device: str) -> None:
    """Run each candidate once and write what ran when to ``path``, for https://ui.perfetto.dev.

    Every rank must call it; those without a path write nothing.
    """
    for work in candidates.values():  # what is made once is no part of a step
        work.backward(work.forward())
        work.finish()
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device == "cuda")
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


def _named(text: str) -> Callable[[Callable], Callable]:
    def make(function):
        def run(*args, **kwargs):
            with record_function(text):
                return function(*args, **kwargs)

        return run

    return make


def _named_second_run(run_again):
    def run(region):
        what = "core attention" if isinstance(region.function, CoreAttention) else "layer"
        with record_function(f"{what} recompute"):
            run_again(region)

    return run
