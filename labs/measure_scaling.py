"""python labs/measure_scaling.py

How the cost of one transformer layer grows with sequence length, hidden size, tensor-parallel size
and number of microbatches: seconds, FLOPs and bytes, with their slopes on logarithmic axes
beside those of the formulas. One process plays the ranks (no torchrun): exchanges take no time.
Exit code 0 if all FLOPs and bytes equal their formulas, 1 if any do not, 2 on wrong use.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console

from actmem.config import ConfigError
from actmem.lab.arguments import ELEMENT_SIZES, LabParser, add_json_argument, add_shape_arguments, check_writable, shape_from
from actmem.lab.race import progress_line
from actmem.lab.ranks import add_rank_arguments, check_ranks, device_type, ranks
from actmem.lab.scaling import AXES, FACTORS, measure_axis, places, slopes
from actmem.lab.speed import check_speed
from actmem.lab.timing import add_timing_arguments, check_timing, clock_name, memory_bytes, setting
from actmem.show.speed_scaling import scaling_figure, scaling_table


def main() -> int:
    parser = LabParser(prog="measure_scaling.py", description=__doc__.split("\n\n")[1])
    add_shape_arguments(parser)
    add_rank_arguments(parser, emulate=False)
    parser.set_defaults(emulate=max(FACTORS))
    add_timing_arguments(parser, rounds=10)
    parser.add_argument("--axis", action="append", choices=AXES, metavar="NAME", help=f"one of {', '.join(AXES)}; may be repeated (default: all)")
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
            for place in places(axis, shape).values():
                check_speed(place.shape, place.tensor_parallel_size, ELEMENT_SIZES[dtype], 1, memory_bytes(device_type(args)))
        for name in ("json", "html"):
            check_writable(name, getattr(args, name))

    torch.manual_seed(1234)
    points = []
    with ranks(args, real_tensors=True) as here:
        for axis in axes:
            points += measure_axis(
                axis, shape, here, getattr(torch, dtype), rounds=args.rounds, cpu_time=args.cpu_time,
                on_round=lambda n, axis=axis: progress_line(f"{axis}: round {n} of {args.rounds + 2}", here),
            )
        progress_line("", here)
        report(args, points, axes, setting(shape, here, dtype), clock_name(args, here.device))
    return 0 if all(point.exact for point in points) else 1


def report(args, points, axes, where, clock) -> None:
    """Print points and slopes, and write the files that are asked for."""
    console = Console()
    found = [slopes([point for point in points if point.axis == axis]) for axis in axes]
    console.print(scaling_table(points, found, f"Cost of a layer: {where}"))
    console.print(
        f"Seconds: medians of {args.rounds} rounds, {clock}. FLOPs and bytes are counted; diff. is their difference to the formulas. "
        "n microbatches run as on the first of 4 pipeline stages, which holds at most 4.",
        highlight=False,
    )
    if args.json:
        document = {"points": [asdict(point) for point in points], "slopes": [asdict(one) for one in found]}
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if args.html:
        from actmem.show.speed_figure import write_page  # plotly is loaded only to draw

        write_page(scaling_figure(points, found, where.replace("\n", ", ")), args.html)
        console.print(f"wrote {args.html}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
