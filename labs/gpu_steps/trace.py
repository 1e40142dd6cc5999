"""One layer's kernels on a time line, under the paper's names, as a profiler sees forward, backward, recomputation."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from actmem.config import ModelShape
from actmem.parallel.groups import tensor_parallel
from actmem_course.lab_tools.held_bytes import layer_runner
from actmem_course.lab_tools.trace import write_trace


def measure_trace(shape: ModelShape, recompute: str, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """The kernels of one step, and its named ranges: short name, start and duration in microseconds."""
    runner = layer_runner(shape, tensor_parallel(sequence_parallel=True), device, dtype, recompute)
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        write_trace({"step": runner.work()}, path, device)
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if device == "cuda" else ("cpu_op",)
    kernels = sorted((e for e in events if e.get("cat") in kinds), key=lambda e: e["ts"])
    if not kernels:
        return {"kernels": [], "ranges": []}
    zero = kernels[0]["ts"]
    on_device = [
        e for e in events if e.get("cat") == ("gpu_user_annotation" if device == "cuda" else "user_annotation")
    ]
    return {
        "kernels": [[_short(e["name"]), round(e["ts"] - zero, 1), round(e["dur"], 1)] for e in kernels[:600]],
        "ranges": [[e["name"], round(e["ts"] - zero, 1), round(e["dur"], 1)] for e in on_device[:300]],
    }


def _short(name: str) -> str:
    """A kernel's name without its template arguments."""
    name = name.replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    return name.removeprefix("void ").partition("<")[0].partition("(")[0][:60]
