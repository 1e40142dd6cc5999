"""Table 4 on the ranks at hand: five ways to run one layer, and the paper's own costlier forms."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from actmem.config import PAPER_MODELS, ConfigError, ModelShape, Parallel, check_layer
from actmem.formulas.activations import eq2, layer_extra_rows, layer_rows
from actmem.formulas.flops import layer_overhead
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.rows import total
from actmem_course.arguments import ELEMENT_SIZES, given_sizes, shape_from
from actmem_course.bench.hold import Held, Runner, hold, layer_runner
from actmem_course.bench.race import Race, race
from actmem_course.bench.timing import check_fits, memory_bytes, ranks_here
from actmem_course.others import paper
from actmem_course.ranks import Ranks
from actmem_course.results import SpeedLine


@dataclass(frozen=True)
class Variant:
    """One line of the table.  paper_row: its name in the paper's table 4; literal: runs again what the
    paper runs again, where ours stops at the last tensor that backward reads."""

    name: str
    sequence_parallel: bool
    recompute: str
    paper_row: str
    literal: bool = False


BASELINE = "baseline, no recompute"
VARIANTS = (
    Variant(BASELINE, False, "none", BASELINE),
    Variant("sequence parallel", True, "none", "sequence parallel"),
    Variant("full recompute", False, "full", "full recompute"),
    Variant("selective", False, "selective", "selective"),
    Variant("selective + sequence parallel", True, "selective", "selective + sequence parallel"),
    Variant("full recompute, literal", False, "paper-full", "full recompute", literal=True),
    Variant("selective, literal", False, "paper-selective", "selective", literal=True),
    Variant("selective + SP, literal", True, "paper-selective", "selective + sequence parallel", literal=True),
)


def check_speed(
    shape: ModelShape, tensor_parallel_size: int, element_size: int, ranks_here: int, memory_bytes: int
) -> None:
    """Raise ConfigError where t cannot share the layer, or real tensors of it cannot fit into memory."""
    t, (a, b, h, s) = tensor_parallel_size, shape.letters()
    check_layer(shape, Parallel(t, sequence_parallel=True))
    weights = (len(VARIANTS) + 1) * 12 * h * h * element_size // t
    each = weights + 2 * eq2(shape, t, element_size) + 2 * element_size * a * s * s * b // t
    check_fits(each, ranks_here, memory_bytes)


def timed_shape(args: argparse.Namespace, size: int, dtype: str) -> ModelShape:
    """The layer to time on so many ranks: what the command line names, and otherwise a layer of the 22B model on GPUs that
    have room for it, because of a tiny one they would time the launches.  Raises ConfigError as ``check_speed``."""

    def checked(shape: ModelShape) -> ModelShape:
        check_speed(shape, size, ELEMENT_SIZES[dtype], ranks_here(args), memory_bytes(args.device))
        return shape

    if args.device == "cuda" and args.model is None and not given_sizes(args):
        with suppress(ConfigError):
            return checked(PAPER_MODELS["22B"].shape)
    return checked(shape_from(args))


def runners_of(shape: ModelShape, ranks: Ranks, dtype: torch.dtype) -> dict[str, Runner]:
    """A layer and an input for each variant, by name."""
    return {
        one.name: layer_runner(shape, group_of(one.sequence_parallel), ranks.device, dtype, one.recompute)
        for one in VARIANTS
    }


def group_of(sequence_parallel: bool) -> TensorParallel:
    """All ranks as one tensor-parallel group."""
    return tensor_parallel(dist.group.WORLD, sequence_parallel=sequence_parallel)


def measure_speed(
    shape: ModelShape,
    ranks: Ranks,
    dtype: torch.dtype,
    *,
    rounds: int,
    on_progress: Callable[[str], None] = lambda text: None,
) -> list[SpeedLine]:
    """A line for each variant.  Every rank must call it; times are the slowest rank's, bytes this one's."""
    runners, held = runners_of(shape, ranks, dtype), {}
    for name, runner in runners.items():
        on_progress(f"counting bytes: {name}")
        held[name] = hold(runner)
    found = race(
        {name: runner.work() for name, runner in runners.items()},
        BASELINE,
        ranks,
        rounds=rounds,
        on_round=lambda n: on_progress(f"timing: round {n} of {rounds + 2}"),
    )
    return [_line(variant, found, held[variant.name], shape, ranks, dtype.itemsize) for variant in VARIANTS]


def _line(variant: Variant, found: Race, held: Held, shape: ModelShape, ranks: Ranks, element_size: int) -> SpeedLine:
    place = (shape, Parallel(ranks.size, variant.sequence_parallel), variant.recompute, element_size)
    return SpeedLine(
        name=variant.name,
        sequence_parallel=variant.sequence_parallel,
        recompute=variant.recompute,
        literal=variant.literal,
        **found.medians(variant.name),
        **found.quartiles(variant.name),
        recompute_seconds=median(sample.recompute_seconds for sample in found.samples[variant.name]),
        over=None if variant.name == BASELINE else found.over(variant.name, BASELINE),
        noise=found.noise,
        flops_overhead=float(layer_overhead(shape, variant.recompute)),
        paper_overhead_percent=paper.TABLE4[variant.paper_row].overhead_percent,
        predicted_bytes=total(layer_rows(*place)) + total(layer_extra_rows(*place, ranks.device)),
        held_bytes=held.held_bytes,
        peak_bytes=held.peak_bytes,
        allocated_bytes=held.allocated_bytes,
        requested_bytes=held.requested_bytes,
        finite=held.finite,
    )
