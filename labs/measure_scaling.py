"""python labs/measure_scaling.py

How the cost of one transformer layer grows with sequence length, hidden size, tensor-parallel size
and number of microbatches: seconds, FLOPs and bytes, with their slopes on logarithmic axes
beside those of the formulas. One process plays the ranks (no torchrun): exchanges send nothing.
Exit code 0 if all FLOPs and bytes equal their formulas, 1 if any do not, 2 on wrong use.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from actmem.config import ConfigError
from actmem_course.arguments import (
    ELEMENT_SIZES,
    LabParser,
    add_json_argument,
    add_shape_arguments,
    shape_from,
)
from actmem_course.bench.measure_scaling import AXES, FACTORS, axis_settings, measure_axis, slopes
from actmem_course.bench.measure_speed import check_speed
from actmem_course.bench.race import progress_line
from actmem_course.bench.timing import add_timing_arguments, check_timing, clock_name, memory_bytes, setting
from actmem_course.files import check_files, replacing, write_text
from actmem_course.process import lab, lab_console
from actmem_course.ranks import add_rank_arguments, check_ranks, ranks
from actmem_course.show.measured import scaling_figure
from actmem_course.show.tables import scaling_table


@lab
def main() -> int:
    parser = LabParser(prog="measure_scaling.py", description=__doc__.split("\n\n")[1])
    add_shape_arguments(parser)
    add_rank_arguments(parser, emulate=False, start=False)
    parser.set_defaults(emulate=max(FACTORS))
    add_timing_arguments(parser, rounds=10)
    parser.add_argument(
        "--axis",
        action="append",
        choices=AXES,
        metavar="NAME",
        help=f"one of {', '.join(AXES)}; may be repeated (default: all)",
    )
    add_json_argument(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the figure (needs plotly)")
    args = parser.parse_args()
    with parser.refusing():
        shape = shape_from(args)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise ConfigError("started by torchrun", f"needs a single process: python labs/{parser.prog}")
        check_ranks(args, parser.prog)
        dtype = check_timing(args)
        axes = [axis for axis in AXES if axis in (args.axis or AXES)]
        for axis in axes:
            for place in axis_settings(axis, shape).values():
                check_speed(place.shape, place.tensor_parallel_size, ELEMENT_SIZES[dtype], 1, memory_bytes(args.device))
        check_files(args, "json", "html")

    torch.manual_seed(1234)
    points = []
    with ranks(args, real_tensors=True) as here:
        for axis in axes:
            points += measure_axis(
                axis,
                shape,
                here,
                getattr(torch, dtype),
                rounds=args.rounds,
                cpu_time=args.cpu_time,
                on_round=lambda n: progress_line(f"{axis}: round {n} of {args.rounds + 2}", here),
            )
        progress_line("", here)
        report(args, points, axes, setting(shape, here, dtype), clock_name(args, here.device))
    return 0 if all(point.exact for point in points) else 1


def report(args, points, axes, where, clock) -> None:
    """Print points and slopes, and write the files that are asked for."""
    console = lab_console()
    found = [slopes([point for point in points if point.axis == axis]) for axis in axes]
    console.print(scaling_table(points, found, f"Cost of a layer: {where}"))
    console.print(
        f"Seconds: medians of {args.rounds} rounds, {clock}. FLOPs and bytes are counted; diff. is their difference to the formulas. "
        "n microbatches run as on the first of 4 pipeline stages, which holds at most 4.",
        highlight=False,
    )
    if args.json:
        document = {"points": [asdict(point) for point in points], "slopes": [asdict(one) for one in found]}
        write_text(args.json, json.dumps(document, indent=1) + "\n")
    if args.html:
        from actmem_course.show.measured import write_page  # plotly is loaded only to draw

        with replacing(args.html) as beside:
            write_page(scaling_figure(points, found, where.replace("\n", ", ")), beside)
        console.print(f"wrote {args.html}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
