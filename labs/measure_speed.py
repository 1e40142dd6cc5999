"""torchrun --nproc-per-node 2 labs/measure_speed.py

Table 4 of 2205.05198, measured: time of forward and backward of one transformer layer without
recomputation, with sequence parallelism, and with full and selective recomputation, in turns, with
the bytes that each holds and its peak; then the paper's own forms, which run more again than needed.
On one GPU: python labs/measure_speed.py --emulate 8 --device cuda --model 22B
How near a large and a small layer are to their matrix products' time, on one process:
python labs/measure_speed.py --products
Exit code 0 if every layer holds what its formula says, 1 if any does not, 2 on wrong use.
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
from actmem_course.bench.measure_products import measure_products
from actmem_course.bench.measure_speed import VARIANTS, check_speed, measure_speed, runners_of
from actmem_course.bench.race import progress_line
from actmem_course.bench.timing import (
    EMULATED,
    add_timing_arguments,
    check_timing,
    clock_name,
    memory_bytes,
    ranks_here,
    setting,
)
from actmem_course.bench.trace import mark_for_nsys, write_trace
from actmem_course.files import check_files, replacing, write_text
from actmem_course.process import lab, lab_console
from actmem_course.ranks import Ranks, add_rank_arguments, check_ranks, ranks
from actmem_course.show.style import milliseconds
from actmem_course.show.tables import noise_line, speed_table


@lab
def main() -> int:
    parser = LabParser(prog="measure_speed.py", description=__doc__.split("\n\n")[1])
    add_shape_arguments(parser, timed=True)
    add_rank_arguments(parser)
    add_timing_arguments(parser)
    add_json_argument(parser)
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write figure 8: forward, recomputation, backward (needs plotly)"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="write rank 0's profiler trace, to open in https://ui.perfetto.dev"
    )
    parser.add_argument(
        "--nvtx", action="store_true", help="run one more step of each with NVTX ranges, for nsys (GPUs only)"
    )
    parser.add_argument(
        "--products",
        action="store_true",
        help="instead: the share of a layer's time that its matrix products alone take",
    )
    args = parser.parse_args()
    if args.products:
        with parser.refusing():
            if "RANK" in os.environ or args.emulate is not None or args.ranks is not None:
                raise ConfigError("products", "needs a single process: python labs/measure_speed.py --products")
            dtype = check_timing(args)
            check_files(args, "json")
        return report_products(args, getattr(torch, dtype))
    with parser.refusing():
        size = check_ranks(args, parser.prog)
        shape = shape_from(args)
        dtype = check_timing(args)
        check_speed(shape, size, ELEMENT_SIZES[dtype], ranks_here(args), memory_bytes(args.device))
        check_files(args, "json", "html", "trace")
        if args.nvtx and args.device != "cuda":
            raise ConfigError("nvtx", "marks work on GPUs, and there is none: use --trace")

    torch.manual_seed(1234)
    with ranks(args, real_tensors=True) as here:
        lines = measure_speed(
            shape,
            here,
            getattr(torch, dtype),
            rounds=args.rounds,
            cpu_time=args.cpu_time,
            on_progress=lambda text: progress_line(text, here),
        )
        progress_line("", here)
        if args.trace:
            runners = runners_of(shape, here, getattr(torch, dtype))
            work = {v.name: runners[v.name].work() for v in VARIANTS}
            if here.rank == 0:
                with replacing(args.trace) as beside:
                    write_trace(work, beside, here.device)
            else:
                write_trace(work, None, here.device)
        if args.nvtx:
            marked = runners_of(shape, here, getattr(torch, dtype))
            mark_for_nsys({name: runner.work() for name, runner in marked.items()})
        wrong = [line for of_rank in here.gather(lines) for line in of_rank if not line.exact]
        if here.rank == 0:
            report(
                args, lines, wrong, f"Table 4 measured: {setting(shape, here, dtype)}", clock_name(args, here.device)
            )
    return 1 if wrong else 0


def report_products(args, dtype: torch.dtype) -> int:
    """Print the share for each shape; the exit code."""
    torch.manual_seed(1234)
    alone = Ranks(0, 1, args.device, False)
    pairs = measure_products(
        rounds=args.rounds, dtype=dtype, device=alone.device, cpu_time=args.cpu_time,
        on_progress=lambda text: progress_line(text, alone),
    )  # fmt: skip
    progress_line("", alone)
    console = lab_console()
    console.print(
        f"Matrix products alone ÷ forward and backward of the layer, {dtype}".replace("torch.", ""), style="bold"
    )
    for pair in pairs:
        times = f"{milliseconds(pair.second_seconds)} of {milliseconds(pair.first_seconds)} ms"
        console.print(
            f"{pair.first}: {pair.ratio:.2f} ({pair.ratio_low:.2f}–{pair.ratio_high:.2f}), {times}", highlight=False
        )
    console.print(
        noise_line(pairs[0].noise, args.rounds, clock_name(args, alone.device)).partition(" Smaller")[0],
        highlight=False,
    )
    if args.json:
        write_text(args.json, json.dumps([asdict(pair) for pair in pairs], indent=1) + "\n")
    return 0


def report(args, lines, wrong, title, clock) -> None:
    """Print the table and what to know about it, and write the files that are asked for."""
    console = lab_console()
    console.print(speed_table(lines, title))
    console.print(noise_line(lines[0].noise, args.rounds, clock), highlight=False)
    if args.emulate is not None:
        console.print(EMULATED, highlight=False)
    if not all(line.finite for line in lines):
        console.print("[bold red]The emulated exchanges made infinities or NaNs, on which kernels can run faster.")
    for line in wrong:
        console.print(
            f"[bold red]{line.name}: holds {line.held_bytes:,} B, by formula {line.predicted_bytes:,} B",
            highlight=False,
        )
    if not wrong:
        console.print(f"All {len(lines)} layers hold what their formulas say, to the byte.", highlight=False)
    if args.json:
        write_text(args.json, json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    if args.html:
        from actmem_course.show.measured import speed_figure, write_page  # plotly is loaded only to draw

        with replacing(args.html) as beside:
            write_page(speed_figure(lines, title.replace("\n", ", ")), beside)
    for path in (args.html, args.trace):
        if path:
            console.print(f"wrote {path}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
