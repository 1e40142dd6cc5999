"""python labs/measure_scaling.py

How the cost of one transformer layer grows with sequence length, hidden size, tensor-parallel size
and number of microbatches: seconds, FLOPs and bytes, with their slopes on logarithmic axes
beside those of the formulas. One process plays the ranks (no torchrun): exchanges send nothing.
Exit code 0 if all FLOPs and bytes equal their formulas, 1 if any do not, 2 on wrong use.
"""

import sys

import torch

from actmem_course.arguments import ELEMENT_SIZES, add_shape_arguments, shape_from
from actmem_course.bench.measure_scaling import AXES, FACTORS, axis_settings, measure_axis, slopes
from actmem_course.bench.measure_speed import check_speed
from actmem_course.bench.runner import Measurement
from actmem_course.bench.timing import add_timing_arguments, check_timing, memory_bytes, setting
from actmem_course.process import lab
from actmem_course.ranks import add_rank_arguments, check_ranks
from actmem_course.show.measured import scaling_figure
from actmem_course.show.tables import scaling_table


@lab
def main() -> int:
    run = Measurement(__doc__)
    add_shape_arguments(run.parser)
    add_rank_arguments(run.parser, emulate=False, start=False)
    run.parser.set_defaults(emulate=max(FACTORS))
    add_timing_arguments(run.parser, rounds=10)
    run.several("axis", AXES)
    run.page()
    with run.asked() as args:
        shape = shape_from(args)
        run.alone()
        check_ranks(args, run.parser.prog)
        dtype, axes, memory = check_timing(args), run.chosen("axis"), memory_bytes(args.device)
        for axis in axes:
            for place in axis_settings(axis, shape).values():
                check_speed(place.shape, place.tensor_parallel_size, ELEMENT_SIZES[dtype], 1, memory)

    points = []
    with run.ranks(real_tensors=True) as here:
        for axis in axes:
            points += measure_axis(
                axis, shape, here, getattr(torch, dtype), rounds=args.rounds, cpu_time=args.cpu_time,
                on_round=lambda n: run.progress(f"{axis}: round {n} of {args.rounds + 2}"),
            )  # fmt: skip
        run.progress()
        found = [slopes([point for point in points if point.axis == axis]) for axis in axes]
        where = setting(shape, here, dtype)
        run.show(
            scaling_table(points, found, f"Cost of a layer: {where}"),
            f"Seconds: medians of {args.rounds} rounds, {run.clock}. FLOPs and bytes are counted; diff. is their difference to the formulas. "
            "n microbatches run as on the first of 4 pipeline stages, which holds at most 4.",
        )
        run.write({"points": points, "slopes": found})
        run.draw(lambda: scaling_figure(points, found, where.replace("\n", ", ")))
    return 0 if all(point.exact for point in points) else 1


if __name__ == "__main__":
    sys.exit(main())
