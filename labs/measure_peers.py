"""torchrun --nproc-per-node 2 labs/measure_peers.py

The same transformer layer by this course, by torch's DTensor plan, by megatron-core and under FSDP2, in one run: time of
forward and backward in turns, bytes held by one ledger, bytes at the peak. Over gloo DTensor and megatron-core run as shipped
and with our reduce-scatter. A peer that is not installed, or cannot run here, is named and left out.
On one GPU: python labs/measure_peers.py --emulate 8 --device cuda --model 22B
What Hugging Face's blocks keep beside ours, on one process: python labs/measure_peers.py --today
Exit code 0, 1 if --today finds other bytes than its formulas, or 2 on wrong use.
"""

import os
import sys
import warnings

import torch

from actmem_course.arguments import add_shape_arguments
from actmem_course.bench.measure_others import measure_others
from actmem_course.bench.measure_peers import (
    NOTES,
    OURS,
    OVER_GLOO,
    PEER_MODES,
    PEERS,
    SAME_EXCHANGE,
    measure_peers,
    table2_units,
)
from actmem_course.bench.measure_speed import timed_shape
from actmem_course.bench.runner import Measurement
from actmem_course.bench.timing import EMULATED, LAYER, add_timing_arguments, check_timing, setting
from actmem_course.process import lab
from actmem_course.ranks import add_rank_arguments, check_ranks
from actmem_course.show import tables

TODAY = "instead: bytes of Hugging Face's blocks and of ours, each by a formula"


@lab
def main() -> int:
    run = Measurement(__doc__)
    add_shape_arguments(run.parser, LAYER)
    add_rank_arguments(run.parser)
    add_timing_arguments(run.parser)
    run.several("peer", tuple(PEERS))
    run.several("recompute", PEER_MODES, "MODE")
    run.option("--no-sequence-parallel", action="store_true", help="tensor parallelism without sequence parallelism")
    run.option("--today", action="store_true", help=TODAY)
    with run.asked() as args:
        if not args.today:
            size = check_ranks(args, run.parser.prog)
            dtype = check_timing(args)
            shape = timed_shape(args, size, dtype)
    # What peers and torch warn of while they are built is not this lab's to say.
    warnings.filterwarnings("ignore")
    if args.today:
        return today(run)

    sequence_parallel = not args.no_sequence_parallel
    with run.ranks(real_tensors=True) as here:
        lines = measure_peers(
            shape, here, getattr(torch, dtype), rounds=args.rounds,
            peers=run.chosen("peer"), modes=run.chosen("recompute"),
            sequence_parallel=sequence_parallel, on_progress=run.progress,
        )  # fmt: skip
        # Every rank counts: an exchange is part of it.
        beside = any(line.over_selective for line in lines)
        units = [table2_units(shape, here, m, sequence_parallel) for m in ("selective", "elementwise") if beside]
        run.progress()
        run.show(f"One layer by others: {setting(shape, here, dtype)}", style="bold")
        run.show(*(tables.peers_table(lines, mode) for mode in dict.fromkeys(line.mode for line in lines)))
        if (overheads := tables.overheads_table(lines)) is not None:
            run.show(overheads)
        run.show(
            f"ours ÷ it: below 1, ours is faster. {args.rounds} rounds, {run.clock}; ours against itself came out up to "
            f"{100 * (lines[0].noise or 0):.1f}% apart. Below each: 95% interval; for bytes, over ours."
        )
        if units:
            run.show(tables.elementwise_line(lines, OURS, *units))
        ran = {line.name.removesuffix(SAME_EXCHANGE) for line in lines if not line.unavailable}
        run.show(*(f"{name}: {NOTES[name]}." for name in PEERS if name in ran))
        run.show(*tables.missing_lines(lines), markup=False)
        if here.device == "cpu" and here.size > 1 and not here.emulated:
            run.show(f"{OURS}: {OVER_GLOO}.")
        if here.emulated:
            run.show(EMULATED)
        if strange := ", ".join(sorted({line.name for line in lines if line.finite is False})):
            run.show(f"Infinities or NaNs in {strange}: kernels can run faster on those.")
        run.write(lines)
    return 0


def today(run: Measurement) -> int:
    """What each layer keeps, why, and how to lose it; the exit code."""
    if int(os.environ.get("RANK", "0")):
        return 0
    torch.manual_seed(1234)
    lines = measure_others()
    run.show(tables.others_table(lines), *(f"{names}: {why}." for why, names in tables.why_lines(lines)))
    run.show(*(f"Left out: {reason}." for reason in dict.fromkeys(one.unavailable for one in lines) if reason))
    ran = [line for line in lines if line.measured_bytes is not None]
    agree = sum(line.measured_bytes == line.predicted_bytes for line in ran)
    run.show(f"{agree} of {len(ran)} measurements agree with the formulas to the byte")
    run.write(lines)
    return 0 if agree == len(ran) else 1


if __name__ == "__main__":
    sys.exit(main())
