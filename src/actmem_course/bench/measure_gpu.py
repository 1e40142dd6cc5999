"""Everything that one GPU can measure: table 2, table 4 and peers on one rank of many; on file after every job."""

from __future__ import annotations

import gc
import json
import platform
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import actmem
from actmem.config import PAPER_MODELS, ModelShape
from actmem.formulas.activations import TABLE2
from actmem.ledger.parts import run_between_others
from actmem.ledger.whole_step import watch_step
from actmem.torch_private import TorchDispatchMode
from actmem_course.bench.hold import layer_runner
from actmem_course.bench.layer_table import LayerTable
from actmem_course.bench.measure_peers import measure_peers
from actmem_course.bench.measure_speed import group_of, measure_speed
from actmem_course.bench.timing import device_name, memory_bytes
from actmem_course.files import write_text
from actmem_course.ranks import Ranks
from actmem_course.results import Claim, plain

_LONG = {"seq_length": 8192, "micro_batch_size": 1}  # a microbatch of one, so that an unsharded layer fits too
_TINY = ModelShape(16, 2, 32, 8, num_layers=1, vocab_size=64)
#: The layers to measure by their models: at the paper's sequence length, then at four times that.
GPU_LAYERS = [(name, PAPER_MODELS[name].shape) for name in ("22B", "175B")]
GPU_LAYERS += [(name, shape.with_sizes(**_LONG)) for name, shape in GPU_LAYERS]
#: The same jobs on layers of no size, quick on a CPU.
QUICK_LAYERS = [("22B, shrunk", _TINY), ("175B, shrunk", _TINY.with_sizes(seq_length=32, micro_batch_size=1))]
#: Two saved random-number states on CUDA, which torch keeps on the CPU.
STATES_BYTES = 32


@dataclass
class Session:
    """What has been measured so far, written to ``path`` after every job.

    A job that fails, or would start after so many ``seconds``, is noted in ``results["skipped"]`` and the next one runs.
    """

    ranks: Ranks
    dtype: torch.dtype
    rounds: int
    seconds: float
    path: Path | None = None
    say: Callable[[str], None] = lambda text: None
    results: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._started = time.monotonic()
        dtype = str(self.dtype).removeprefix("torch.")
        self.results.update(
            date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            machine=machine(self.ranks.device),
            settings={"tensor_parallel_size": self.ranks.size, "dtype": dtype, "rounds": self.rounds},
            cases=[], skipped=[],
        )  # fmt: skip

    def measure(self, layers: Sequence[tuple[str, ModelShape]]) -> dict:
        """Run all jobs, the most important first; gives ``results``."""
        place, entries = (self.ranks, self.dtype), self.results["cases"]
        for model, shape in layers:
            name, entry = f"{model} at s = {shape.seq_length}", {"model": model, **asdict(shape), "table2": []}
            entries.append(entry)
            for row in TABLE2:
                one = partial(LayerTable(shape, configurations=(row,)).measure, *place)
                entry["table2"] += self.job(f"{name}, table 2, {row.name}", one, [])
            entry["speed"] = self.job(f"{name}, speed", partial(measure_speed, shape, *place, rounds=self.rounds), [])
        for (model, shape), entry in zip(layers, entries, strict=True):
            theirs = partial(measure_peers, shape, *place, rounds=self.rounds)
            entry["peers"] = self.job(f"{model} at s = {shape.seq_length}, peers", theirs, [])
        curve = partial(allocated_curve, layers[0][1], *place)
        self.results["curve"] = self.job("memory over a step", curve, {})
        self.results["claims"] = claims(self.results)
        self.write()
        return self.results

    def job(self, name: str, run: Callable[[], Any], otherwise: object) -> Any:
        """What ``run()`` gives; ``otherwise`` if it failed or had no time."""
        self.say(name)
        reason = "no time left"
        try:
            if time.monotonic() - self._started < self.seconds:
                return run()
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        finally:
            # Otherwise what a failed job left behind could make the next one fail.
            gc.collect()
            if self.ranks.device == "cuda":
                torch.cuda.empty_cache()
            self.write()
        self.results["skipped"].append({"job": name, "reason": reason})
        self.say(f"{name}: skipped, {reason}")
        return otherwise

    def write(self) -> None:
        """Put all results so far into the file, or leave the old file as it is."""
        if self.path is not None:
            self.results["seconds"] = round(time.monotonic() - self._started, 1)
            write_text(self.path, json.dumps(self.results, default=plain, indent=1) + "\n")


def machine(device: str) -> dict:
    """What was measured with: device, driver, versions."""
    try:
        megatron_core = version("megatron-core")
    except PackageNotFoundError:
        megatron_core = None
    found = {
        "device": device_name(device),
        "memory_bytes": memory_bytes(device),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.system(),
        "actmem": actmem.__version__,
        "commit": _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "megatron_core": megatron_core,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.partition("\n")[0].strip() or None if done.returncode == 0 else None


class _Allocated(TorchDispatchMode):
    """Asks the allocator after each operation; on a CPU there is none to ask."""

    def __init__(self, device: str):
        super().__init__()
        self.asks, self.curve = device == "cuda", list[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.curve += [torch.cuda.memory_allocated()] * self.asks
        return result


def allocated_curve(shape: ModelShape, ranks: Ranks, dtype: torch.dtype) -> dict:
    """One layer's forward and backward with selective recomputation and SP: the picture's data.

    allocated_bytes: what the allocator had given out after each operation.  counted_bytes: the same step by live storages,
    which needs no GPU (``watch_step``), at more moments.  Both without what there was before the step.
    """
    place = shape, group_of(sequence_parallel=True), ranks.device, dtype, "selective"
    one = layer_runner(*place)
    with watch_step(one.module, None, one.leaf) as bill:
        run_between_others(one.module, one.leaf)
    one = layer_runner(*place)
    before = torch.cuda.memory_allocated() if ranks.device == "cuda" else 0
    with _Allocated(ranks.device) as seen:
        y = one.module(one.leaf)
        y.backward(y.detach())
    return {
        "allocated_bytes": [held - before for held in seen.curve],
        "counted_bytes": [held - bill.curve[0] for held in bill.curve],
    }


def claims(results: dict) -> list[Claim]:
    """What the measurements say about each claim that they can say something about."""
    speed = [line for case in results["cases"] for line in case["speed"]]
    counted = [row.exact for row in (*(row for case in results["cases"] for row in case["table2"]), *speed)]
    asked = [
        abs(line.requested_bytes - line.held_bytes) <= STATES_BYTES
        for line in speed
        if line.requested_bytes is not None
    ]
    found = (
        ("every layer holds what its formula says, to the byte", counted),
        ("the allocator was asked for what the ledger holds (random-number states are not on the GPU)", asked),
    )
    return [Claim(claim, f"{sum(each)} of {len(each)}", all(each)) for claim, each in found if each]
