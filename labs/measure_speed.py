"""torchrun --nproc-per-node 2 labs/measure_speed.py

Table 4 of 2205.05198, measured: the times of forward and backward of one transformer layer, without recomputation, with
sequence parallelism, and with full and selective recomputation, run in turns; and the bytes that each saves, and its
peak.  Then the same for recomputation exactly as in the paper, which recomputes more than needed.
On one GPU: python labs/measure_speed.py --emulate 8 --device cuda --model 22B
Exit code 0 if every layer holds what its formula says, 1 if any does not, 2 on wrong use.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from actmem.config import ModelShape, Parallel, check_layer
from actmem.formulas.activations import eq2, layer_extra_rows, layer_rows
from actmem.formulas.flops import layer_overhead
from actmem.parallel.groups import tensor_parallel
from actmem.rows import total
from actmem_course.figures.text import overhead_text
from actmem_course.figures.units import milliseconds, size_text
from actmem_course.lab_tools import options
from actmem_course.lab_tools.held_bytes import Runner, held_by, layer_runner
from actmem_course.lab_tools.machine import EMULATED, clock_name, first_that_fits
from actmem_course.lab_tools.output import WRONG, gather_rows, screen_of, show_progress, write_rows
from actmem_course.lab_tools.tables import numbers, red_if, table, two_lines
from actmem_course.lab_tools.timing import time_in_turns
from actmem_course.lab_tools.trace import write_trace
from actmem_course.others import paper
from actmem_course.process import lab
from actmem_course.ranks import Ranks, check_ranks, ranks

BASELINE = "baseline, no recompute"
PARTS = ("forward", "backward", "combined")


@dataclass(frozen=True)
class Variant:
    """One form of the layer to time, a line of the table.

    Attributes:
        name: the line's name, such as "selective".
        sequence_parallel: whether the ranks use sequence parallelism in addition to tensor parallelism.
        recompute: what backward recomputes: "none", "selective" or "full"; "paper-selective" or "paper-full" recompute
            exactly as the paper does.
        paper_row: the name of the line of the paper's table 4 with which the times are compared.
        literal: whether a region is recomputed to its end, as in the paper; otherwise recomputation stops at the last
            tensor that backward reads.
    """

    name: str
    sequence_parallel: bool
    recompute: str
    paper_row: str
    literal: bool = False


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


@lab
def main() -> int:
    parser = options.timing_parser("measure_speed.py", __doc__ or "")
    options.add_file_argument(parser, "trace", "write rank 0's profiler trace, to open in https://ui.perfetto.dev")
    args = parser.parse_args()
    with parser.refusing():
        size = check_ranks(args, parser.prog, "json", "trace")
        dtype = options.check_timing(args)
        shape = speed_shape(args, size, dtype)

    with ranks(args, real_tensors=True) as here:
        screen = screen_of(here.rank)
        place = (shape, here, getattr(torch, dtype))
        rows = measure_speed(*place, rounds=args.rounds)
        if args.trace:
            trace(args.trace, *place)
        wrong = [row for row in gather_rows(here, rows) if not row["exact"]]
        title = f"Table 4 measured: {options.described(shape, here, dtype)}"
        screen.print(speed_table(rows, title))
        screen.print(
            f"Medians of {args.rounds} rounds ({clock_name(here.device)}); overheads by round, with half of their 95% "
            "interval. “within”: no more than noise can make."
        )
        if here.emulated:
            screen.print(EMULATED)
        for row in wrong:
            held, predicted = row["held_bytes"], row["predicted_bytes"]
            screen.print(f"{row['name']}: holds {held:,} B, by formula {predicted:,} B", style=WRONG)
        if not wrong:
            screen.print(f"All {len(rows)} layers hold what their formulas say, to the byte.")
        write_rows(args.json, here.rank, rows)
        if args.trace:
            screen.print(f"wrote {args.trace}", soft_wrap=True)
    return 1 if wrong else 0


def speed_shape(args: argparse.Namespace, size: int, dtype: str) -> ModelShape:
    """Return the shape of the layer to time.

    Args:
        args: the parsed options of ``timing_parser``.
        size: how many ranks share the layer.
        dtype: its name, such as "bfloat16".

    Raises: ConfigError if the ranks can't share the layer, or have no room for real tensors.
    """
    shapes = options.layer_shapes(args)
    check_layer(shapes[0], Parallel(size, sequence_parallel=True))
    element_size = options.ELEMENT_SIZES[dtype]
    return first_that_fits({shape: needed_bytes(shape, size, element_size) for shape in shapes}, args)


def needed_bytes(shape: ModelShape, size: int, e: int) -> int:
    """Estimate the bytes that one rank needs: the weights of all variants, and the tensors of one variant's step.

    The step's tensors are twice what the layer saves, and two tensors of attention scores.

    Args:
        shape: the layer's sizes, unsharded.
        size: t, how many ranks share the layer.
        e: bytes of an element.
    """
    a, b, h, s = shape.letters()
    return (len(VARIANTS) + 1) * 12 * h * h * e // size + 2 * eq2(shape, size, e) + 2 * e * a * s * s * b // size


def measure_speed(shape: ModelShape, here: Ranks, dtype: torch.dtype, *, rounds: int) -> list[dict[str, Any]]:
    """Time every variant, and count its bytes.  Every rank must call this function.

    Args:
        shape: the layer's sizes, unsharded.
        here: this rank.
        dtype: of the weights and the input.
        rounds: how many rounds are timed.

    Returns: a dict for each variant; times are those of the slowest rank, bytes those of this rank:
        "name", "sequence_parallel", "recompute", "literal": the fields of the ``Variant``.
        "forward_seconds", "backward_seconds", "combined_seconds": medians.
        "over": how much longer the variant takes than BASELINE, a dict from ``Timings.over``; None for BASELINE.
        "flops_overhead": the FLOPs that recomputation adds, as a share.
        "paper_overhead_percent": the overhead in the paper's table 4; None if the table has none.
        "predicted_bytes", "held_bytes": bytes held between forward and backward, by formula and counted.
        "peak_bytes": the most bytes at once in forward or backward.
        "exact": whether held and predicted bytes are equal.
    """
    runners, held = runners_of(shape, here, dtype), {}
    for name, runner in runners.items():
        show_progress(here.rank, f"counting bytes: {name}")
        held[name] = held_by(runner)
    timed = time_in_turns({name: runner.work() for name, runner in runners.items()}, here, rounds=rounds)
    rows = []
    for variant in VARIANTS:
        name = variant.name
        layer = shape, Parallel(here.size, variant.sequence_parallel), variant.recompute, dtype.itemsize
        predicted = total(layer_rows(*layer)) + total(layer_extra_rows(*layer, here.device))
        rows.append({
            "name": name,
            "sequence_parallel": variant.sequence_parallel,
            "recompute": variant.recompute,
            "literal": variant.literal,
            **timed.medians(name),
            "over": None if name == BASELINE else timed.over(name, BASELINE),
            "flops_overhead": float(layer_overhead(shape, variant.recompute)),
            "paper_overhead_percent": paper.TABLE4[variant.paper_row].overhead_percent,
            "predicted_bytes": predicted,
            **held[name],
            "exact": held[name]["held_bytes"] == predicted,
        })  # fmt: skip
    return rows


def runners_of(shape: ModelShape, here: Ranks, dtype: torch.dtype) -> dict[str, Runner]:
    """Make a layer and its input for each variant.

    Args:
        shape: the layer's sizes, unsharded.
        here: this rank.
        dtype: of the weights and the input.

    Returns: by the variant's name a ``Runner``: the layer with its input, to be timed or measured.
    """
    return {
        one.name: layer_runner(
            shape, tensor_parallel(sequence_parallel=one.sequence_parallel), here.device, dtype, one.recompute
        )
        for one in VARIANTS
    }


def trace(path: Path, shape: ModelShape, here: Ranks, dtype: torch.dtype) -> None:
    """Write a profiler trace of all variants.  Every rank must call this function; only rank 0 writes its trace.

    Args:
        path: the file to write.
        shape: the layer's sizes, unsharded.
        here: this rank.
        dtype: of the weights and the input.
    """
    work = {name: runner.work() for name, runner in runners_of(shape, here, dtype).items()}
    write_trace(work, None if here.rank else path, here.device)


def speed_table(rows: list[dict[str, Any]], title: str) -> Table:
    """Make a table like the paper's table 4, with three lines for each variant.

    The first line has median times and the overhead; the second the bytes held for backward and the FLOPs that
    recomputation adds; the third the peak bytes and the overhead that the paper prints.

    Args:
        rows: the dicts from ``measure_speed``.
        title: the lines above the table.
    """
    columns = map(numbers, ("forward", "backward", "both", "overhead"))
    made = table(title, "one layer, milliseconds", *columns, tight=True)
    for row in rows:
        label = Text(row["name"], style=red_if(not row["exact"]))
        held = f"\n  holds {size_text(row['held_bytes'])}\n  peak {size_text(row['peak_bytes'])}"
        label.append(held, style="dim not bold")
        times = (milliseconds(row[f"{part}_seconds"]) for part in PARTS)
        below = [f"FLOPs +{100 * row['flops_overhead']:.1f}%" if row["flops_overhead"] else ""]
        if row["paper_overhead_percent"] is not None:
            below.append(f"paper {row['paper_overhead_percent']:+}%")
        made.add_row(label, *times, two_lines(overhead_text(row["over"]), "\n".join(below)))
    return made


if __name__ == "__main__":
    sys.exit(main())
