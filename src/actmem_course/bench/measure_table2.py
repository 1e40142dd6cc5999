"""Measure table 2 on the ranks at hand: six configurations, each predicted and measured."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from actmem.config import ModelShape, check_layer
from actmem.formulas.activations import TABLE2, Configuration, eq1, layer_extra_rows, layer_rows
from actmem.measure.parts import measure_layer
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.rows import Row, compare, total
from actmem_course.arguments import ELEMENT_SIZES
from actmem_course.bench.timing import check_fits
from actmem_course.ranks import Ranks
from actmem_course.results import Table2Result

#: What who only counts may do where real tensors don't fit.
OR_EMULATE = "use --emulate, or smaller sizes"


def check_table2(shape: ModelShape, tensor_parallel_size: int) -> None:
    """Raise ConfigError if t ranks cannot measure all six configurations of this shape."""
    for configuration in TABLE2:
        check_layer(shape, configuration.parallel(tensor_parallel_size))


def check_memory(shape: ModelShape, element_size: int, ranks_here: int, memory_bytes: int) -> None:
    """Raise ConfigError if real tensors of the largest configuration cannot fit into memory.

    The largest is the first: all of eq. 1 and the layer's 12h² weights, on every rank at once,
    and two score tensors (as²b each) that are needed for a moment.
    """
    a, b, h, s = shape.letters()
    each = eq1(shape, element_size) + 12 * h * h * element_size + 2 * element_size * a * s * s * b
    check_fits(each, ranks_here, memory_bytes, OR_EMULATE)


def measure_table2(
    shape: ModelShape,
    ranks: Ranks,
    dtype: torch.dtype,
    on_configuration: Callable[[Configuration], None] = lambda configuration: None,
    configurations: Sequence[Configuration] = TABLE2,
) -> list[Table2Result]:
    """This rank's results, in the order of the table.  Every rank must call it."""
    results = []
    for configuration in configurations:
        on_configuration(configuration)
        parallel = configuration.parallel(ranks.size)
        if parallel.tensor_parallel_size == 1:
            tp = TensorParallel(sequence_parallel=parallel.sequence_parallel)
        else:
            tp = tensor_parallel(dist.group.WORLD, sequence_parallel=parallel.sequence_parallel)
        measured = measure_layer(shape, tp, configuration.recompute, device=ranks.device, dtype=dtype)
        place = (shape, parallel, configuration.recompute, dtype.itemsize)
        rows = layer_rows(*place), layer_extra_rows(*place, ranks.device), measured
        names = configuration.name, configuration.formula(dtype.itemsize)
        results.append(layer_result(*names, parallel.tensor_parallel_size, ranks.rank, *rows))
    return results


def layer_result(
    name: str, formula: str, t: int, rank: int, predicted: list[Row], extra: list[Row], measured: list[Row]
) -> Table2Result:
    """One line of a table of layers from its rows: of the formula, of what that leaves out, and counted."""
    comparison = compare(predicted + extra, measured)
    sums = total(predicted), total(extra), total(measured)
    wrong = "" if comparison.exact else comparison.describe()
    return Table2Result(name, formula, t, rank, *sums, sums[2] - sums[0] - sums[1], comparison.exact, wrong)


def extras_of_table2(args: argparse.Namespace, shape: ModelShape, ranks: Ranks) -> list[Row]:
    """The extra rows of all six configurations, for the list of reasons."""
    return [
        row
        for configuration in TABLE2
        for row in layer_extra_rows(
            shape,
            configuration.parallel(ranks.size),
            configuration.recompute,
            ELEMENT_SIZES[args.dtype],
            ranks.device,
        )
    ]
