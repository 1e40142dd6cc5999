"""What one layer costs as one size grows: seconds, FLOPs and bytes, and their slopes, measured and by formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from actmem.config import ConfigError, ModelShape, Parallel
from actmem.formulas.activations import layer_extra_rows, layer_rows
from actmem.formulas.first_stage import in_flight
from actmem.formulas.flops import forward_products
from actmem.formulas.schedule import one_forward_one_backward
from actmem.layers.transformer import TransformerLayer
from actmem.measure.ledger import record
from actmem.measure.parts import layer_input
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.rows import total
from actmem_course.bench.peak import clear_gradients
from actmem_course.bench.race import Runner, Work, race_of
from actmem_course.ranks import Ranks
from actmem_course.results import ScalingPoint, ScalingSlopes

AXES = ("seq_length", "hidden_size", "tensor_parallel_size", "num_microbatches")
#: Microbatches run in the order of the first of this many pipeline stages.
STAGES = 4
FACTORS = (1, 2, 4, 8)


@dataclass(frozen=True)
class AxisSetting:
    """What is run at one value of an axis: the shape, t, and the microbatches of a step."""

    shape: ModelShape
    tensor_parallel_size: int = 1
    num_microbatches: int = 1

    @property
    def parallel(self) -> Parallel:
        return Parallel(self.tensor_parallel_size, sequence_parallel=True)


def axis_settings(axis: str, base: ModelShape) -> dict[int, AxisSetting]:
    """The values of one axis, each half to four times the base's, and what is run at each.

    Raises ConfigError where the base cannot be halved, or t = 8 cannot share it.
    """
    if axis in ("seq_length", "hidden_size"):
        size = getattr(base, axis)
        if size % 2:
            raise ConfigError(axis, f"{size} must be even: its half is measured too")
        return {size * factor // 2: AxisSetting(base.with_sizes(**{axis: size * factor // 2})) for factor in FACTORS}
    if axis == "tensor_parallel_size":
        return {factor: AxisSetting(base, tensor_parallel_size=factor) for factor in FACTORS}
    return {factor: AxisSetting(base, num_microbatches=factor) for factor in FACTORS}


def measure_axis(
    axis: str,
    base: ModelShape,
    ranks: Ranks,
    dtype: torch.dtype,
    *,
    rounds: int,
    cpu_time: bool = False,
    on_round: Callable[[int], None] = lambda number: None,
) -> list[ScalingPoint]:
    """The points of one axis, timed in turns.  For an emulated rank of at least max(FACTORS)."""
    at = axis_settings(axis, base)
    steps = {value: _Step(place, ranks.device, dtype) for value, place in at.items()}
    counted = {value: step.count() for value, step in steps.items()}
    work = {str(value): step.work() for value, step in steps.items()}
    found = race_of(work, next(iter(work)), ranks, rounds=rounds, cpu_time=cpu_time, on_round=on_round)
    points = []
    for value, place in at.items():
        seconds, (flops, held) = found.spread(str(value)), counted[value]
        points.append(
            ScalingPoint(
                axis, value, seconds.median, (seconds.lower_quartile, seconds.upper_quartile), predicted_flops(place), flops,
                predicted_bytes(place, dtype.itemsize, ranks.device), held,
            )
        )  # fmt: skip
    return points


def predicted_flops(place: AxisSetting) -> int:
    """Forward and backward of one layer on one of t ranks, all microbatches.  Appendix A."""
    one_layer = place.shape.with_sizes(num_layers=1)
    forward = sum(
        p.flops
        for p in forward_products(one_layer, place.num_microbatches * place.shape.micro_batch_size)
        if p.term != "logits"
    )
    return 3 * forward // place.tensor_parallel_size


def predicted_bytes(place: AxisSetting, element_size: int, device: str) -> int:
    """Held by one layer on one of t ranks when the first stage of a pipeline holds most."""
    each = total(layer_rows(place.shape, place.parallel, element_size=element_size))
    each += total(layer_extra_rows(place.shape, place.parallel, element_size=element_size, device_type=device))
    return each * in_flight(Parallel(pipeline_parallel_size=STAGES), 0, place.num_microbatches)


class _Step:
    """One layer, run for all microbatches in the order of the first stage of a pipeline."""

    def __init__(self, place: AxisSetting, device: str, dtype: torch.dtype):
        t = place.tensor_parallel_size
        group = dist.new_group(list(range(t))) if t > 1 else None
        tp = tensor_parallel(group, sequence_parallel=True) if t > 1 else TensorParallel()
        layer = TransformerLayer(place.shape, tp, device=device, dtype=dtype)
        self.runner = Runner(layer, layer_input(place.shape, tp, device, dtype))
        actions = one_forward_one_backward(STAGES, place.num_microbatches)[0]
        self.actions = [(action.kind, action.microbatch) for action in actions]

    def work(self) -> Work:
        return Work(self._run, lambda _: None, self._finish)

    def count(self) -> tuple[int, int]:
        """FLOPs of a step, and the most bytes that its microbatches hold together, by the ledger."""
        with FlopCounterMode(display=False) as counter:
            self._run()
        self._finish()
        held: dict[int, tuple[Tensor, int]] = {}
        most = 0
        for kind, microbatch in self.actions:
            if kind == "B":
                del held[microbatch]
                continue
            with record(self.runner.module) as ledger:
                output = self.runner.module(self.runner.leaf.clone())
            held[microbatch] = output, ledger.total_bytes
            most = max(most, sum(size for _, size in held.values()))
        return counter.get_total_flops(), most

    def _run(self) -> None:
        held: dict[int, Tensor] = {}
        for kind, microbatch in self.actions:
            if kind == "F":
                held[microbatch] = self.runner.module(self.runner.leaf)
            else:
                output = held.pop(microbatch)
                output.backward(output.detach())

    def _finish(self) -> None:
        clear_gradients(self.runner.module, self.runner.leaf)


def slope(values: Sequence[float], costs: Sequence[float]) -> float:
    """Exponent k of the power law cost ~ valueᵏ that fits best (least squares of the logarithms)."""
    xs, ys = [math.log(value) for value in values], [math.log(cost) for cost in costs]
    middle_x, middle_y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - middle_x) * (y - middle_y) for x, y in zip(xs, ys)) / sum((x - middle_x) ** 2 for x in xs)


def slopes(points: Sequence[ScalingPoint]) -> ScalingSlopes:
    """The slopes of the points of one axis."""
    values = [point.value for point in points]
    lowest, highest = ([point.quartiles[side] for point in points] for side in (0, 1))
    # The steepest and the flattest line that the quartiles at both ends allow.
    middle = [point.seconds for point in points[1:-1]]
    steep = slope(values, [lowest[0], *middle, highest[-1]])
    flat = slope(values, [highest[0], *middle, lowest[-1]])
    return ScalingSlopes(
        points[0].axis,
        slope(values, [point.seconds for point in points]),
        (steep - flat) / 2,
        slope(values, [point.predicted_flops for point in points]),
        slope(values, [point.predicted_bytes for point in points]),
    )
