"""torchrun --nproc-per-node 2 labs/measure_peers.py

The same transformer layer by this course, by torch's DTensor plan, by megatron-core and under
FSDP2, in one run: time of forward and backward in turns, bytes held by one ledger, bytes at the
peak. A peer that is not installed, or cannot run here, is named and left out.
On one GPU: python labs/measure_peers.py --emulate 8 --device cuda --model 22B
What Hugging Face's blocks keep beside ours, on one process: python labs/measure_peers.py --today
Exit code 0, 1 if --today finds other bytes than its formulas, or 2 on wrong use.
"""

import json
import os
import sys
import warnings
from dataclasses import asdict

import torch

from actmem_course.arguments import (
    ELEMENT_SIZES,
    LabParser,
    add_json_argument,
    add_shape_arguments,
    shape_from,
)
from actmem_course.bench.measure_others import measure_others
from actmem_course.bench.measure_peers import (
    COMPILED,
    LITERAL,
    NOTES,
    OURS,
    OVER_GLOO,
    PEER_MODES,
    PEERS,
    SAME_EXCHANGE,
    measure_peers,
    table2_units,
)
from actmem_course.bench.measure_speed import check_speed
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
from actmem_course.files import check_files, write_text
from actmem_course.process import lab, lab_console
from actmem_course.ranks import add_rank_arguments, check_ranks, ranks
from actmem_course.show.tables import (
    elementwise_line,
    missing_lines,
    others_table,
    overheads_table,
    peers_table,
    why_lines,
)


@lab
def main() -> int:
    parser = LabParser(prog="measure_peers.py", description=__doc__.split("\n\n")[1])
    add_shape_arguments(parser)
    add_rank_arguments(parser)
    add_timing_arguments(parser)
    add_json_argument(parser)
    parser.add_argument(
        "--peer",
        action="append",
        choices=tuple(PEERS),
        metavar="NAME",
        help=f"one of {', '.join(PEERS)}; may be repeated (default: all)",
    )
    parser.add_argument(
        "--recompute",
        action="append",
        choices=PEER_MODES,
        metavar="MODE",
        help=f"one of {', '.join(PEER_MODES)}; may be repeated (default: all)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="our layer under torch.compile too (a minute more, and a C++ compiler on CPUs)",
    )
    parser.add_argument(
        "--no-sequence-parallel", action="store_true", help="tensor parallelism without sequence parallelism"
    )
    parser.add_argument(
        "--today", action="store_true", help="instead: bytes of Hugging Face's blocks and of ours, each by a formula"
    )
    args = parser.parse_args()
    if args.today:
        with parser.refusing():
            check_files(args, "json")
        return report_today(args)
    with parser.refusing():
        shape = shape_from(args)
        size = check_ranks(args, parser.prog)
        dtype = check_timing(args)
        check_speed(shape, size, ELEMENT_SIZES[dtype], ranks_here(args), memory_bytes(args.device))
        check_files(args, "json")

    # What peers and torch warn of while they are built is not this lab's to say.
    warnings.filterwarnings("ignore")
    torch.manual_seed(1234)
    with ranks(args, real_tensors=True) as here:
        lines = measure_peers(
            shape,
            here,
            getattr(torch, dtype),
            rounds=args.rounds,
            cpu_time=args.cpu_time,
            peers=[COMPILED] * args.compile + [name for name in PEERS if name in (args.peer or PEERS)],
            modes=[mode for mode in PEER_MODES if mode in (args.recompute or PEER_MODES)],
            sequence_parallel=not args.no_sequence_parallel,
            on_progress=lambda text: progress_line(text, here),
        )
        # Every rank counts: an exchange is part of it.
        units = [
            table2_units(shape, here, mode, not args.no_sequence_parallel)
            for mode in ("selective", "elementwise")
            if any(line.over_selective for line in lines)
        ]
        progress_line("", here)
        if here.rank == 0:
            report(args, lines, units, setting(shape, here, dtype), clock_name(args, here.device), here)
    return 0


def report_today(args) -> int:
    """Print what each layer keeps, why, and how to lose it; the exit code."""
    if int(os.environ.get("RANK", "0")):
        return 0
    warnings.filterwarnings("ignore")
    torch.manual_seed(1234)
    lines = measure_others()
    console = lab_console()
    console.print(others_table(lines))
    for why, names in why_lines(lines):
        console.print(f"{names}: {why}.", highlight=False)
    for reason in dict.fromkeys(line.unavailable for line in lines if line.unavailable):
        console.print(f"Left out: {reason}.", highlight=False)
    ran = [line for line in lines if line.measured_bytes is not None]
    agree = sum(line.measured_bytes == line.predicted_bytes for line in ran)
    console.print(f"{agree} of {len(ran)} measurements agree with the formulas to the byte", highlight=False)
    if args.json:
        write_text(args.json, json.dumps([asdict(line) for line in lines], indent=1) + "\n")
    return 0 if agree == len(ran) else 1


def report(args, lines, units, where, clock, here) -> None:
    """Print a table for each mode and what to know about the peers, and write the file that is asked for."""
    console = lab_console()
    console.print(f"One layer by others: {where}", style="bold", highlight=False)
    for mode in dict.fromkeys(line.mode for line in lines):
        console.print(peers_table(lines, mode))
    if (table := overheads_table(lines)) is not None:
        console.print(table)
    noise = lines[0].noise
    console.print(
        f"ours ÷ it: below 1, ours is faster. {args.rounds} rounds, {clock}; ours against itself came out up to "
        f"{100 * noise:.1f}% apart. Below each: 95% interval; for bytes, over ours.",
        highlight=False,
    )
    if units:
        console.print(elementwise_line(lines, OURS, *units), highlight=False)
    ran = {line.name.removesuffix(SAME_EXCHANGE) for line in lines if not line.unavailable}
    for name in (*PEERS, LITERAL, COMPILED):
        if name in ran:
            console.print(f"{name}: {NOTES[name]}.", highlight=False)
    for sentence in missing_lines(lines):
        console.print(sentence, highlight=False, markup=False)
    if here.device == "cpu" and here.size > 1 and not here.emulated:
        console.print(f"{OURS}: {OVER_GLOO}.", highlight=False)
    if args.emulate is not None:
        console.print(EMULATED, highlight=False)
    strange = sorted({line.name for line in lines if line.finite is False})
    if strange:
        console.print(
            f"Emulated exchanges made infinities or NaNs in {', '.join(strange)}: kernels can run faster on those.",
            highlight=False,
        )
    if args.json:
        write_text(args.json, json.dumps([asdict(line) for line in lines], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
