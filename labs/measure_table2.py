"""torchrun --nproc-per-node 2 labs/measure_table2.py

Table 2 of 2205.05198, measured: for each of the six configurations, the bytes that one
transformer layer saves for backward, by formula and by counting what autograd really holds.
--elementwise: also with recomputation of all that needs no matmul, which the paper doesn't have.
Exit code 0 if all agree to the byte, 1 if any does not, 2 on wrong use.
"""

import argparse
import sys
from typing import Any

import torch

from actmem.config import ModelShape, check_layer
from actmem.formulas.activations import ELEMENTWISE, TABLE2, Configuration, eq1, layer_extra_rows, layer_rows
from actmem.rows import Row
from actmem_course.arguments import add_rank_arguments
from actmem_course.lab_tools import options
from actmem_course.lab_tools.layer_bytes import layer_result, print_layers
from actmem_course.lab_tools.machine import first_that_fits
from actmem_course.lab_tools.output import gather_rows, screen_of, status, write_rows
from actmem_course.process import lab
from actmem_course.ranks import Ranks, check_ranks, ranks


@lab
def main() -> int:
    parser = options.lab_parser("measure_table2.py", __doc__ or "")
    options.add_shape_arguments(parser, options.DEFAULT_LAYER)
    options.add_dtype_argument(parser)
    parser.add_argument("--elementwise", action="store_true", help="also recompute all that needs no matmul")
    add_rank_arguments(parser)
    args = parser.parse_args()
    with parser.refusing():
        size = check_ranks(args, parser.prog, "json")
        dtype, table = getattr(torch, args.dtype), TABLE2 + (ELEMENTWISE,) * args.elementwise
        shape = shape_for(args, size, dtype)

    with ranks(args) as here:
        screen = screen_of(here.rank)
        with status(here.rank, "measuring"):
            rows = gather_rows(here, [measure(shape, configuration, here, dtype) for configuration in table])
        extra = [row for configuration in table for row in predict(shape, configuration, here, dtype)[1]]
        title = f"Table 2 measured: {options.described(shape, here, args.dtype)}"
        exact = print_layers(screen, rows, title, extra)
        write_rows(args.json, here.rank, rows)
    return 0 if exact else 1


def shape_for(args: argparse.Namespace, size: int, dtype: torch.dtype) -> ModelShape:
    """Return the shape of the layer to measure.

    Args:
        args: the parsed options.
        size: how many ranks there are.
        dtype: of the weights and the input.

    Raises: ConfigError if the ranks can't share the layer in every configuration, or if real tensors don't fit into
        memory.
    """
    shapes = options.layer_shapes(args)
    for configuration in TABLE2:
        check_layer(shapes[0], configuration.parallel(size))
    if args.emulate is not None:
        return shapes[0]
    needed = {shape: needed_bytes(shape, dtype) for shape in shapes}
    return first_that_fits(needed, args, "use --emulate, or smaller sizes")


def needed_bytes(shape: ModelShape, dtype: torch.dtype) -> int:
    """Estimate the bytes that one rank needs for the largest configuration, the one without parallelism.

    These are the bytes that the layer saves, its weights, and two tensors of attention scores (as²b elements each).

    Args:
        shape: the layer's sizes.
        dtype: of the weights and the input.
    """
    a, b, h, s = shape.letters()
    return eq1(shape, dtype.itemsize) + dtype.itemsize * (12 * h * h + 2 * a * s * s * b)


def predict(
    shape: ModelShape, configuration: Configuration, here: Ranks, dtype: torch.dtype
) -> tuple[list[Row], list[Row]]:
    """Predict what one layer saves on one rank.

    Args:
        shape: the layer's sizes, unsharded.
        configuration: a row of Table 2.
        here: this rank, which knows the number of ranks and the device.
        dtype: of the activations.

    Returns: rows of the tensors that the paper counts, and rows of the tensors that it leaves out.
    """
    layer = shape, configuration.parallel(here.size), configuration.recompute, dtype.itemsize
    return layer_rows(*layer), layer_extra_rows(*layer, here.device)


def measure(shape: ModelShape, configuration: Configuration, here: Ranks, dtype: torch.dtype) -> dict[str, Any]:
    """Predict and measure the layer in one configuration on this rank.  Every rank must call this function.

    Args:
        shape: the layer's sizes, unsharded.
        configuration: a row of Table 2.
        here: this rank.
        dtype: of the weights and the input.

    Returns: the dict from ``layer_bytes.layer_result``: predicted and measured bytes, and whether they agree.
    """
    # What measures is loaded only now: options are refused before.
    from actmem.ledger.measure_layer import measure_layer
    from actmem.parallel.groups import TensorParallel, tensor_parallel

    tp = TensorParallel()
    if configuration.tensor_parallel:
        tp = tensor_parallel(sequence_parallel=configuration.sequence_parallel)
    measured = measure_layer(shape, tp, configuration.recompute, device=here.device, dtype=dtype)
    predicted, extra = predict(shape, configuration, here, dtype)
    formula = configuration.formula(dtype.itemsize)
    return layer_result(configuration.name, formula, tp.size, here.rank, predicted, extra, measured)


if __name__ == "__main__":
    sys.exit(main())
