"""torchrun --nproc-per-node 2 labs/measure_speed.py

Table 4 of 2205.05198, measured: time of forward and backward of one transformer layer without
recomputation, with sequence parallelism, and with full and selective recomputation, in turns, with
the bytes that each holds and its peak; then the paper's own forms, which run more again than needed.
On one GPU: python labs/measure_speed.py --emulate 8 --device cuda --model 22B
Exit code 0 if every layer holds what its formula says, 1 if any does not, 2 on wrong use.
"""

import sys

import torch

from actmem.config import ConfigError
from actmem_course.arguments import add_shape_arguments
from actmem_course.bench.measure_speed import VARIANTS, measure_speed, runners_of, timed_shape
from actmem_course.bench.runner import Measurement
from actmem_course.bench.timing import EMULATED, LAYER, add_timing_arguments, check_timing, setting
from actmem_course.bench.trace import mark_for_nsys, write_trace
from actmem_course.files import replacing
from actmem_course.lab_figures import speed_figure
from actmem_course.process import lab
from actmem_course.ranks import add_rank_arguments, check_ranks
from actmem_course.show.tables import noise_line, speed_table

NVTX = "run one more step of each with NVTX ranges, for nsys (GPUs only)"


@lab
def main() -> int:
    run = Measurement(__doc__)
    add_shape_arguments(run.parser, LAYER)
    add_rank_arguments(run.parser)
    add_timing_arguments(run.parser)
    run.page("figure 8: forward, recomputation, backward")
    run.file("trace", "write rank 0's profiler trace, to open in https://ui.perfetto.dev")
    run.option("--nvtx", action="store_true", help=NVTX)
    with run.asked() as args:
        size = check_ranks(args, run.parser.prog)
        dtype = check_timing(args)
        shape = timed_shape(args, size, dtype)
        if args.nvtx and args.device != "cuda":
            raise ConfigError("nvtx", "marks work on GPUs, and there is none: use --trace")

    with run.ranks(real_tensors=True) as here:
        place = (shape, here, getattr(torch, dtype))
        lines = measure_speed(*place, rounds=args.rounds, on_progress=run.progress)
        run.progress()
        if args.trace:
            trace(args.trace, place)
        if args.nvtx:
            mark_for_nsys({name: runner.work() for name, runner in runners_of(*place).items()})
        wrong = [line for line in run.gathered(lines) if not line.exact]
        title = f"Table 4 measured: {setting(shape, here, dtype)}"
        run.show(speed_table(lines, title), noise_line(lines[0].noise, args.rounds, run.clock))
        if here.emulated:
            run.show(EMULATED)
        if not all(line.finite for line in lines):
            run.wrong("A layer's output has infinities or NaNs, on which kernels can run faster.")
        run.wrong(*(f"{o.name}: holds {o.held_bytes:,} B, by formula {o.predicted_bytes:,} B" for o in wrong))
        if not wrong:
            run.show(f"All {len(lines)} layers hold what their formulas say, to the byte.")
        run.write(lines)
        run.draw(lambda: speed_figure(lines, title.replace("\n", ", ")))
        if args.trace:
            run.show(f"wrote {args.trace}")
    return 1 if wrong else 0


def trace(path, place) -> None:
    """A profiler trace of all variants; every rank runs them, rank 0 writes."""
    runners, here = runners_of(*place), place[1]
    work = {v.name: runners[v.name].work() for v in VARIANTS}
    if here.rank:
        write_trace(work, None, here.device)
    else:
        with replacing(path) as beside:
            write_trace(work, beside, here.device)


if __name__ == "__main__":
    sys.exit(main())
