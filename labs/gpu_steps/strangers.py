"""Real training steps of models from other libraries, beside what ``actmem record`` and ``plan`` predict for them.

``record --step --fake --device cuda`` and ``plan`` run on the CPU in processes of their own, while the GPU runs
measurements that are not timed.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

MODELS = Path(__file__).with_name("models.py")
#: What a process runs that predicts.  It ends with this one, however that ends.
_RUN = (
    "from actmem_course.ranks import end_with_parent; end_with_parent(); "
    "import runpy; runpy.run_module('actmem_tools', run_name='__main__')"
)
#: Which model, at which sizes, to try the script on a CPU.
QUICK = (("llama_1b", "s=32,b=1,h=64,a=4,k=2,f=96,l=2,v=128"), ("gpt_dropout", "s=32,b=1,h=64,a=4,l=2,v=50304"))
#: Which model, at which sizes.
STEPS = (("llama_1b", "s=4096,b=2"), ("llama_8b_lora", "s=2048,b=1"), ("gpt_dropout", "s=1024,b=4"))
#: All the sizes, which ``plan`` wants.
PLAN_SIZES = {
    "llama_1b": "h=2048,a=32,k=8,f=8192,l=16,v=128256",
    "llama_8b_lora": "h=4096,a=32,k=8,f=14336,l=32,v=128256",
    "gpt_dropout": "h=2048,a=16,l=24,v=50304",
}


class Predictions:
    """Runs ``actmem record`` and ``plan`` in background processes, one for each prediction.

    A training step has the name of its row in the results: the model's name, a space, and the sizes.

    Args:
        device: "cpu" or "cuda", for which ``record`` predicts.
        memory_gib: the GPU's memory in GiB, for which ``plan`` predicts.
    """

    def __init__(self, device: str, memory_gib: float):
        self.device, self.memory_gib = device, memory_gib
        self._folder = TemporaryDirectory()
        self._running: dict[tuple[str, str], subprocess.Popen] = {}

    def start_record(self, name: str, sizes: str) -> None:
        """Start ``record``, which finds the peak of a step with optimizer states, on fake tensors.

        Args:
            name: the model, a function in models.py, such as "llama_1b".
            sizes: the model's sizes, such as "s=4096,b=2".
        """
        options = ("--step", "--fake", "--device", self.device, "--dtype", "bfloat16", "--at", sizes)
        self._start("record_fake", f"{name} {sizes}", "record", f"{MODELS}:{name}", *options)

    def start_plan(self, name: str, sizes: str) -> None:
        """Start ``plan``, which predicts the peak of a step on one GPU from runs of a tiny model.

        Args:
            name: the model, a function in models.py, such as "llama_1b".
            sizes: the model's sizes, such as "s=4096,b=2"; sizes that are left out are taken from PLAN_SIZES.
        """
        own = "" if "h=" in sizes else f",{PLAN_SIZES[name]}"
        options = ("--at", f"{sizes}{own}", "--memory", f"{self.memory_gib:.0f}")
        self._start("plan", f"{name} {sizes}", "plan", f"{MODELS}:{name}", *options)

    def about(self, step: str) -> list[str]:
        """Return which predictions were started for a step: "record_fake", "plan" or both.

        Args:
            step: the step's name, such as "llama_1b s=4096,b=2".
        """
        return [kind for kind, of in self._running if of == step]

    def add_to(self, row: dict[str, Any], kind: str, timeout: float) -> None:
        """Wait for a prediction and put it into the results' row of its step.

        Args:
            row: the step's row, a dict with the step's name as "name"; it is changed.
            kind: the prediction, "record_fake" or "plan", which is also its key in the row.
            timeout: seconds to wait at most.

        Raises:
            TimeoutError: the prediction is not ready in time.
            RuntimeError: the prediction's process failed; the message is the last line that the process printed.
        """
        process = self._running[kind, row["name"]]
        try:
            _, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"not ready after {timeout:.0f} s") from None
        file = self._file(kind, row["name"])
        if not file.exists():  # a plan that does not fit is an answer, with exit code 1
            raise RuntimeError((errors.decode(errors="replace").strip().splitlines() or ["failed"])[-1])
        found = json.loads(file.read_text())
        planned = ("asked", "bill", "ways")
        row[kind] = _recorded(found) if kind == "record_fake" else {key: found[key] for key in planned}

    def stop(self) -> None:
        """Kill the processes that still run, and remove their files."""
        for process in self._running.values():
            process.kill()
            process.wait()
        self._folder.cleanup()

    def _start(self, kind: str, step: str, *command: str) -> None:
        words = [sys.executable, "-c", _RUN, *command, "--json", str(self._file(kind, step))]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
        self._running[kind, step] = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, start_new_session=True
        )

    def _file(self, kind: str, step: str) -> Path:
        return Path(self._folder.name) / f"{kind} {step}.json"


def measure_real_step(name: str, sizes: str, device: str) -> dict[str, Any]:
    """Run two plain training steps with AdamW on a GPU, and measure the second, which has optimizer states.

    Args:
        name: the model, a function in models.py, such as "llama_1b".
        sizes: the model's sizes, such as "s=4096,b=2".
        device: "cpu" or "cuda".

    Returns: a dict with "sizes" and "parameters" (how many the model has), and on a GPU with bytes by the allocator:
        "before_bytes": allocated before the step.
        "peak_bytes": the peak of forward and backward.
        "step_peak_bytes": the peak of forward, backward and the optimizer's step.
        "cublas_bytes": cuBLAS's workspaces.
        "memory_reserved": the most bytes that the allocator reserved.
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


def _recorded(result: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a recorded step, without its thousands of rows."""
    by_kind: dict[str, int] = {}
    for row in result.get("peak", []):
        by_kind[row["kind"]] = by_kind.get(row["kind"], 0) + row["bytes"]
    return {
        "kept_bytes": result["total_bytes"], "peak_bytes": result.get("peak_bytes"), "peak_by_kind": by_kind,
        "notes": result["notes"],
    }  # fmt: skip
