"""One real training step of models that somebody else wrote, beside what this course's tools say before it runs.

``record --step --fake --device cuda`` and ``plan`` run in processes of their own.  They start first, because they take
the CPU's time and not the GPU's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

MODELS = Path(__file__).with_name("models.py")
#: Sizes of the step, small enough to try the script on a CPU.
QUICK = "s=32,b=1,h=64,a=4,k=2,f=96,l=2,v=128"
#: Which model, at which sizes.
STEPS = (("llama_1b", "s=2048,b=2"), ("llama_1b", "s=4096,b=2"), ("llama_8b_lora", "s=2048,b=1"))
#: All the sizes, which ``plan`` wants.
PLAN_SIZES = {
    "llama_1b": "h=2048,a=32,k=8,f=8192,l=16,v=128256",
    "llama_8b_lora": "h=4096,a=32,k=8,f=14336,l=32,v=128256",
}


class Predictions:
    """``record`` and ``plan`` in the background, one process each; ``result`` waits for one."""

    def __init__(self, device: str, memory_gib: float):
        self.folder, self.device, self.memory_gib = Path(mkdtemp()), device, memory_gib
        self._running: dict[str, subprocess.Popen] = {}

    def start_record(self, name: str, sizes: str) -> None:
        """The peak of a warm step on fake tensors."""
        key = f"record fake {_key(name, sizes)}"
        self._start(
            key,
            "record",
            f"{MODELS}:{name}",
            "--step",
            "--device",
            self.device,
            "--dtype",
            "bfloat16",
            "--at",
            sizes,
            "--fake",
        )

    def start_plan(self, name: str, sizes: str) -> None:
        """The bill of one step on one GPU, solved from tiny runs."""
        own = "" if "h=" in sizes else f",{PLAN_SIZES[name]}"
        self._start(
            f"plan {_key(name, sizes)}",
            "plan", f"{MODELS}:{name}", "--at", f"{sizes}{own}", "--memory", f"{self.memory_gib:.0f}",
        )  # fmt: skip

    def result(self, key: str, timeout: float) -> dict[str, Any]:
        """The JSON of a process that was started, or ``{"error": why}``."""
        process = self._running[key]
        try:
            _, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            return {"error": f"not ready after {timeout:.0f} s"}
        if process.returncode:
            return {"error": errors.decode(errors="replace").strip().splitlines()[-1] if errors else "failed"}
        return json.loads(self._file(key).read_text())

    def stop(self) -> None:
        """End what still runs."""
        for process in self._running.values():
            if process.poll() is None:
                process.kill()

    def _start(self, key: str, *command: str) -> None:
        words = [sys.executable, "-m", "actmem_tools", *command, "--json", str(self._file(key))]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
        self._running[key] = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, start_new_session=True
        )

    def _file(self, key: str) -> Path:
        return self.folder / f"{key.replace(' ', '-')}.json"


def _key(name: str, sizes: str) -> str:
    return f"{name}-{sizes}".replace("=", "").replace(",", "-")


def measure_real_step(name: str, sizes: str, device: str) -> dict[str, Any]:
    """A warm step with AdamW as anybody would write it: the allocator's peak, and bytes between steps.

    peak_bytes: of forward and backward.  step_peak_bytes: of the whole step, the optimizer's too.
    """
    from gpu_steps.models import FACTORIES

    numbers = {letter: int(size) for letter, size in (pair.split("=") for pair in sizes.split(","))}
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model, inputs = FACTORIES[name](**numbers)
    finally:
        torch.set_default_dtype(torch.float32)
    model.train()
    inputs = {key: value.to(device) for key, value in inputs.items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained)
    found: dict[str, Any] = {"sizes": sizes, "parameters": sum(p.numel() for p in model.parameters())}
    for _ in range(2):
        if device == "cuda":
            torch.cuda.synchronize()
            found["before_bytes"] = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        model(**inputs).loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()
            found["peak_bytes"] = torch.cuda.max_memory_allocated()
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()
            found["step_peak_bytes"] = torch.cuda.max_memory_allocated()
        optimizer.zero_grad()
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch._C._cuda_clearCublasWorkspaces()
        found["cublas_bytes"] = before - torch.cuda.memory_allocated()
        found["memory_reserved"] = torch.cuda.max_memory_reserved()
    return found


def measure_stranger(name: str, sizes: str, device: str, predictions: Predictions, seconds: float) -> dict[str, Any]:
    """The real step, and beside it the peaks that ``record`` and ``plan`` said before."""
    found = measure_real_step(name, sizes, device)
    torch.cuda.empty_cache()
    fake = predictions.result(f"record fake {_key(name, sizes)}", seconds)
    found["record_fake"] = _summary(fake)
    if f"plan {_key(name, sizes)}" in predictions._running:
        plan = predictions.result(f"plan {_key(name, sizes)}", seconds)
        found["plan"] = plan if "error" in plan else _plan_summary(plan)
    return found


def _summary(result: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a recorded step, without its thousands of rows."""
    if "error" in result:
        return result
    by_kind: dict[str, int] = {}
    for row in result.get("peak", []):
        by_kind[row["kind"]] = by_kind.get(row["kind"], 0) + row["bytes"]
    return {
        "kept_bytes": result["total_bytes"], "peak_bytes": result.get("peak_bytes"), "peak_by_kind": by_kind,
        "notes": result["notes"],
    }  # fmt: skip


def _plan_summary(plan: dict[str, Any]) -> dict[str, Any]:
    """The way that was asked for, as the planner bills it."""
    return {key: plan[key] for key in ("asked", "bill", "ways") if key in plan} or plan
