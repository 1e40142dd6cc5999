"""NVIDIA's tests on this machine: the last rank's model runs as one emulated rank, and each line is counted.

Only bytes beyond those held at rest are compared, peak less held: weights, gradients and optimizer states cancel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

import torch

from actmem.config import ModelShape
from actmem.layers.gpt import GPT
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.recorder import SavedTensor
from actmem.ledger.whole_step import watch_step
from actmem.parallel.groups import tensor_parallel
from actmem_course.bench.measure_others import bytes_of_second_run
from actmem_course.bench.measure_peers import OURS, build
from actmem_course.bench.peers import PeerUnavailable
from actmem_course.others.golden import LAYERS_AND_HEAD, WHY_APART, GoldenResult, HereResult
from actmem_course.others.megatron_memory import MegatronRun

_AT_REST = ("weight", "gradient", "buffer")


def runs_here(run: MegatronRun) -> bool:
    """Whether the course has this model: the paper's own layer, and one chunk of it on the last rank."""
    other = run.swiglu or run.rms_norm or run.rotary or run.qk_layernorm or run.latent or run.experts or run.deferred
    own = run.linear_bias and run.dropout and run.attention == "unfused"
    return own and not other and len(run.chunks) == run.cp == 1


def count_here(results: Sequence[GoldenResult]) -> list[HereResult]:
    """Rows whose model the course has, each counted on an emulated rank; equal models are counted once."""
    found = []
    for result in results:
        if not (result.played and result.row.peak_bytes and result.row.held_bytes and runs_here(result.played.run)):
            continue
        run = result.played.run
        sizes = run.s, run.b, run.h, run.a, run.v, run.t
        counted = _counted(sizes, run.chunks[0], run.has_embedding, run.sequence_parallel, run.full_recompute)
        on_gpu = Counter[str]()
        for line, size in result.active_lines.items():
            on_gpu[line if line in WHY_APART else LAYERS_AND_HEAD] += size
        more = None if run.full_recompute else _more_in_megatron_core(sizes, run.sequence_parallel)
        theirs = None if more is None else sum(counted.values()) + run.chunks[0] * more
        found.append(HereResult(result, run, counted, dict(on_gpu), theirs))
    return found


def distinct(results: Sequence[HereResult]) -> list[HereResult]:
    """One result of each model, whole models first."""
    models = {tuple(r.counted.items()): r for r in reversed(results)}
    return sorted(
        models.values(), key=lambda r: (not r.run.has_embedding, r.run.t, r.run.full_recompute, -r.run.chunks[0])
    )


@cache
def _counted(sizes: tuple[int, ...], layers: int, whole: bool, shared: bool, full: bool) -> dict[str, int]:
    """Bytes of each line at the peak of one forward and backward."""
    s, b, h, a, v, t = sizes
    shape = ModelShape(s, b, h, a, num_layers=layers + (not whole), vocab_size=v)
    held = range(shape.num_layers - layers, shape.num_layers)
    with emulated_rank(t):
        tp = tensor_parallel(sequence_parallel=shared)
        model = GPT(shape, tp, layers=held, recompute="full" if full else "none", dtype=torch.bfloat16)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        targets = torch.zeros(b, s, dtype=torch.long)
        x = torch.zeros_like(targets)
        if not whole:
            x = torch.zeros(s // t if shared else s, b, h, dtype=torch.bfloat16, requires_grad=True)
        with watch_step(model) as bill:
            model.loss(model(x), targets).backward()
    lines = Counter[str]()
    for row in bill.peak:
        if row.kind not in _AT_REST:
            lines[_line(row, v // t)] += row.bytes
    return dict(lines)


def _line(row: SavedTensor, classes: int) -> str:
    """The played run's line that a counted storage belongs to."""
    if row.op == "layer_norm" and row.shape[-1:] == (1,):
        return "norm statistics"
    if row.module == "cross_entropy":
        return "logits, float32" if row.shape[-1:] == (classes,) else "loss"
    if row.kind.startswith("made by") and row.shape[-1:] == (classes,):
        return "logits, 16 bits"  # or their gradient, as the played run has it
    if row.kind == "generator state":
        return "generator states"
    if row.kind == "made by backward":
        return "transient"
    return "batch" if row.dtype in (torch.int64, torch.int32) else LAYERS_AND_HEAD


@cache
def _more_in_megatron_core(sizes: tuple[int, ...], shared: bool) -> int | None:
    """Bytes that a layer of megatron-core keeps on this CPU beyond ours; None where it isn't installed."""
    s, b, h, a, _, t = sizes
    with emulated_rank(t, real_tensors=True):
        tp = tensor_parallel(sequence_parallel=shared)
        try:
            theirs, ours = (
                bytes_of_second_run(
                    build(name, ModelShape(s, b, h, a), tp, "none", "cpu", torch.bfloat16),
                    (s // t if shared else s, b, h),
                )
                for name in ("megatron-core", OURS)
            )
        except PeerUnavailable:
            return None
    return theirs - ours
