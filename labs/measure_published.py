"""python labs/measure_published.py

Compare the GPU peaks that others published of their training runs with what `actmem plan` predicts for the same runs.
Also predict what torch's allocator would reserve: the code that the plan prints runs on fake tensors. It takes a
quarter of an hour and no GPU, and writes the predictions to a file for chapter 9. No constant is fitted. Exit code 0,
whatever the differences; chapter 9 explains them.
"""

import json
import shlex
import subprocess
import sys
from functools import cache, partial
from importlib import resources
from typing import Any

import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from actmem.config import ConfigError
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.storages import replaced
from actmem_course import others
from actmem_course.arguments import LabParser
from actmem_course.lab_tools.reserved_memory import allocator_bytes
from actmem_course.launch import LABS
from actmem_course.others.published_runs import PublishedRun, published_runs
from actmem_course.process import lab
from actmem_more.gpu_kernels import gpu_kernels_on_cpu
from actmem_tools.config_file import read_config
from actmem_tools.load_model import built_model, load_factory, tensors_for
from actmem_tools.plan.framework_flags import hugging_face_config
from actmem_tools.plan.plan_command import plan_parser
from actmem_tools.plan.planned_models import planned_model_of
from actmem_tools.tape.config_model import ConfigModel

#: Of the plans that ``actmem plan`` prints under "with all blocks alike".
PLANS = ("no", "all", "part")


@lab
def main() -> int:
    LabParser(prog="measure_published.py", description=__doc__.partition("\n\n")[2]).parse_args()
    numbers = predictions(published_runs())
    lines = ["name\tallocated\treserved", *(f"{name}\t{plan}\t{held}" for name, (plan, held) in numbers.items())]
    with resources.as_file(resources.files(others) / "published_predictions.tsv") as path:
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for run in published_runs():
        predicted, apart = run.predicted_bytes, run.difference_percent
        told = f"not predicted: {run.left_out}" if predicted is None else f"{predicted:,} B predicted, {apart:+.1f}%"
        print(f"{run.name}: {run.published_bytes:,} B {run.kind}, {told}")
    return 0


def predictions(runs: list[PublishedRun]) -> dict[str, tuple[int, int]]:
    """Predict all runs that have a command.

    Args:
        runs: the published runs, from ``published_runs``.

    Returns: for each run, by its name, the predicted bytes: those allocated at the peak, and those reserved.
    """
    return {run.name: prediction(run.command, run.recomputes, run.held) for run in runs if run.command}


@cache
def prediction(command: str, recomputes: str, held: str) -> tuple[int, int]:
    """Predict one published run: the most bytes allocated, and the bytes that the allocator reserves.

    Args:
        command: the `actmem plan …` command that describes the run.
        recomputes: which blocks the run recomputes: "no" for none, "all" for every block, "part" for the part of every
            block that --again names.
        held: "logits" if the run kept its float32 logits from one forward pass to the next; otherwise "".
    """
    plan = plan_of(command)
    way = plan["all_blocks"][PLANS.index(recomputes)]
    allocated, reserved = allocator_says(command, plan, way, held)
    return allocated if held else way["bytes"], reserved


@cache
def plan_of(command: str) -> dict[str, Any]:
    """Run an `actmem plan …` command, and return the object that it writes as JSON.

    Raises: ConfigError if the command fails.
    """
    words = [sys.executable, "-m", "actmem_tools", *shlex.split(command)[1:], "--json", "-"]
    run = subprocess.run(words, cwd=LABS.parent, capture_output=True, text=True)
    if run.returncode > 1:  # 1 says that it doesn't fit
        raise ConfigError("command", f"{command} failed: {run.stderr.strip()}")
    return json.loads(run.stdout)


def allocator_says(command: str, plan: dict[str, Any], way: dict[str, Any], held: str) -> tuple[int, int]:
    """Run training steps of a plan on fake tensors, and replay what they allocate in a model of torch's allocator.

    Args:
        command: the `actmem plan …` command that made the plan.
        plan: the plan, from ``plan_of``.
        way: an entry of ``plan["all_blocks"]``; its "code" changes the model before the steps.
        held: "logits" if the run kept its float32 logits from one forward pass to the next; otherwise "".

    Returns: the most bytes allocated at once, and the bytes reserved in the end.
    """
    options = plan_parser().parse_args(shlex.split(command)[2:])
    gpus = options.gpus or 1
    sizes = {**plan["sizes"], "b": way["micro_batch_size"], "l": plan["blocks"]["number"]}
    dtype = "float32" if way["sharded"] else options.dtype or "bfloat16"  # FSDP2 gathers in that
    with emulated_rank(gpus, real_tensors=True):
        shard = partial(fsdp.fully_shard, mesh=init_device_mesh("cpu", (gpus,)))
        with tensors_for(True), gpu_kernels_on_cpu(), replaced(fsdp, "fully_shard", lambda _: shard):
            if ":" in options.model:
                factory = load_factory(str(LABS.parent / options.model))
            elif options.model.endswith(".json"):
                factory = ConfigModel(read_config(str(LABS.parent / options.model))).factory()
            else:
                factory = ConfigModel(hugging_face_config(planned_model_of(options.model))).factory()
            model, inputs = built_model(factory, sizes, dtype)
            made: dict[str, Any] = {"model": model, "torch": torch}
            if held == "logits":
                made["model"].get_output_embeddings().register_forward_hook(held_logits)
            exec("\n".join(way["code"]), made)
            # The plan names no optimizer where it is torch's default, which on a GPU has foreach.
            optimizer = made.get("optimizer") or torch.optim.AdamW(model.parameters(), foreach=True)
            return allocator_bytes(model, inputs, optimizer, (options.global_batch or 1) // gpus // sizes["b"] or 1)


def held_logits(head: torch.nn.Module, _: Any, logits: torch.Tensor) -> torch.Tensor:
    """Convert logits to float32, and keep them alive until the next forward pass, as some runs did: a forward hook.

    Args:
        head: the output layer, which gets the float32 logits as an attribute.
        logits: what the output layer returned.

    Returns: the float32 logits, which then are the output layer's result.
    """
    head.logits = logits.float()
    return head.logits


if __name__ == "__main__":
    sys.exit(main())
