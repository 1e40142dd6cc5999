"""Everything that one GPU can measure: table 2, table 4 and peers on one rank of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import torch

from actmem.config import ModelShape, Parallel, check_layer
from actmem.formulas.activations import TABLE2
from actmem.layers.transformer import TransformerLayer
from actmem.measure.parts import layer_input, measure_layer_peak
from actmem.models import PAPER_MODELS
from actmem.torch_private import TorchDispatchMode
from actmem_course.bench.layer_table import LayerTable
from actmem_course.bench.measure_peers import PEERS, measure_peers
from actmem_course.bench.measure_speed import group_of, measure_speed
from actmem_course.bench.session import Session
from actmem_course.results import Claim


@dataclass(frozen=True)
class Case:
    """One layer to measure.  A long sequence runs as a microbatch of one, so that an unsharded layer fits too."""

    model: str
    shape: ModelShape


@dataclass(frozen=True)
class GpuPlan:
    """How much to do: the layers, and the rounds of each timing."""

    cases: tuple[Case, ...]
    rounds: int


def full_plan() -> GpuPlan:
    """The 22B and the 175B layer, at the paper's sequence length and at four times that."""
    shapes = {name: PAPER_MODELS[name].shape for name in ("22B", "175B")}
    cases = [Case(name, shape) for name, shape in shapes.items()]
    cases += [Case(name, shape.with_sizes(seq_length=8192, micro_batch_size=1)) for name, shape in shapes.items()]
    return GpuPlan(tuple(cases), rounds=20)


def quick_plan() -> GpuPlan:
    """The same jobs on tiny layers, quick on a CPU."""
    shape = ModelShape(16, 2, 32, 8, num_layers=1, vocab_size=64)
    cases = (Case("22B, shrunk", shape), Case("175B, shrunk", shape.with_sizes(seq_length=32, micro_batch_size=1)))
    return GpuPlan(cases, rounds=2)


def check_plan(plan: GpuPlan, tensor_parallel_size: int) -> None:
    """Raise ConfigError if one of that many ranks can't run every job of the plan."""
    for case in plan.cases:
        check_layer(case.shape, Parallel(tensor_parallel_size, sequence_parallel=True))


def run_plan(plan: GpuPlan, session: Session) -> dict:
    """Run all jobs of a plan, the most important first; gives ``session.results``."""
    session.results["settings"]["rounds"] = plan.rounds
    place, rounds, entries = (session.ranks, session.dtype), plan.rounds, session.results["cases"]
    for case in plan.cases:
        entry = {"model": case.model, **asdict(case.shape), "table2": [], "speed": [], "peers": []}
        entries.append(entry)
        name = f"{case.model} at s = {case.shape.seq_length}"
        for row in TABLE2:
            one = partial(LayerTable(case.shape, configurations=(row,)).measure, *place)
            entry["table2"] += session.job(f"{name}, table 2, {row.name}", one, [])
        entry["speed"] = session.job(f"{name}, speed", partial(measure_speed, case.shape, *place, rounds=rounds), [])
    for case, entry in zip(plan.cases, entries, strict=True):
        theirs = partial(measure_peers, case.shape, *place, rounds=rounds, peers=tuple(PEERS))
        entry["peers"] = session.job(f"{case.model} at s = {case.shape.seq_length}, peers", theirs, [])
    session.results["curve"] = session.job(
        "memory over a step", lambda: allocated_curve(plan.cases[0].shape, session), {}
    )
    session.results["claims"] = claims(session.results)
    session.write()
    return session.results


class _Allocated(TorchDispatchMode):
    """Asks the allocator after each operation; on a CPU there is none to ask."""

    def __init__(self, device: str):
        super().__init__()
        self.asks, self.curve = device == "cuda", list[int]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.curve += [torch.cuda.memory_allocated()] * self.asks
        return result


def allocated_curve(shape: ModelShape, session: Session) -> dict:
    """One layer's forward and backward with selective recomputation and SP: the picture's data.

    allocated_bytes: what the allocator had given out after each operation.  counted_bytes: the same step by live storages,
    which needs no GPU (``measure_layer_peak``), at more moments.  Both without what there was before the step.
    """
    ranks, tp = session.ranks, group_of(sequence_parallel=True)
    counted = measure_layer_peak(shape, tp, "selective", device=ranks.device, dtype=session.dtype).curve
    layer = TransformerLayer(shape, tp, recompute="selective", device=ranks.device, dtype=session.dtype)
    x = layer_input(shape, tp, ranks.device, session.dtype)
    before = torch.cuda.memory_allocated() if ranks.device == "cuda" else 0
    with _Allocated(ranks.device) as seen:
        y = layer(x)
        y.backward(y.detach())
    return {
        "allocated_bytes": [held - before for held in seen.curve],
        "counted_bytes": [held - counted[0] for held in counted],
    }


#: Two saved random-number states on CUDA, which torch keeps on the CPU.
STATES_BYTES = 32


def claims(results: dict) -> list[Claim]:
    """What the measurements say about each claim that they can say something about."""
    found, cases = [], results["cases"]
    counted = [row.exact for case in cases for row in (*case["table2"], *case["speed"])]
    if counted:
        found.append(_all("every layer holds what its formula says, to the byte", counted))
    asked = [
        abs(line.requested_bytes - line.held_bytes) <= STATES_BYTES
        for case in cases
        for line in case["speed"]
        if line.requested_bytes is not None
    ]
    if asked:
        what = "the allocator was asked for what the ledger holds (random-number states are not on the GPU)"
        found.append(_all(what, asked))
    return found


def _all(claim: str, each: Sequence[bool]) -> Claim:
    return Claim(claim, f"{sum(each)} of {len(each)}", all(each))
