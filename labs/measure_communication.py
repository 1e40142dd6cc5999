"""torchrun --nproc-per-node 2 labs/measure_communication.py

What the ranks of one transformer layer exchange (2205.05198 section 4.2): number, kind and bytes of
the collectives in every mode, by formula and counted; what the ranks' sockets really sent for them;
one all-reduce against a reduce-scatter and an all-gather of the same bytes; and how much of
backward's exchanges the matrix products hide.
Exit code 0 if every count agrees with the formula, 1 if any does not, 2 on wrong use.
"""

import json
import os
import sys
from dataclasses import asdict
from functools import partial

import torch

from actmem.config import Parallel, check_layer
from actmem.formulas.gloo_headers import HEADER_BYTES, MESSAGES
from actmem_course.arguments import (
    ELEMENT_SIZES,
    LabParser,
    add_json_argument,
    add_shape_arguments,
    shape_from,
)
from actmem_course.bench.measure_communication import (
    TORCHS,
    compare_collectives,
    compare_overlap,
    count_exchanges,
    measure_sent,
)
from actmem_course.bench.measure_speed import check_speed
from actmem_course.bench.race import progress_line
from actmem_course.bench.timing import add_timing_arguments, check_timing, clock_name, memory_bytes, ranks_here, setting
from actmem_course.files import check_files, write_text
from actmem_course.process import lab, lab_console
from actmem_course.ranks import add_rank_arguments, check_ranks, ranks
from actmem_course.show.tables import compared_lines, exchanges_table, sent_table

GLOO = (
    f"Headers: {HEADER_BYTES} bytes before each of gloo's messages, {MESSAGES} messages for each piece of data. {TORCHS.capitalize()} "
    "over gloo is an all-reduce that forgets the rest; ours sends only what is kept (parallel/gloo.py)."
)


@lab
def main() -> int:
    parser = LabParser(prog="measure_communication.py", description=__doc__.split("\n\n")[1])
    add_shape_arguments(parser, timed=True)
    add_rank_arguments(parser)
    add_timing_arguments(parser)
    add_json_argument(parser)
    args = parser.parse_args()
    with parser.refusing():
        size = check_ranks(args, parser.prog)
        shape = shape_from(args)
        dtype = check_timing(args)
        check_layer(shape, Parallel(size, sequence_parallel=True))
        if args.emulate is None:  # an emulated rank on a CPU needs no memory: it only counts
            check_speed(shape, size, ELEMENT_SIZES[dtype], ranks_here(args), memory_bytes(args.device))
        check_files(args, "json")

    torch.manual_seed(1234)
    with ranks(args) as here:
        counted = count_exchanges(shape, here, getattr(torch, dtype))
        sent = measure_sent(shape, here, getattr(torch, dtype))
        timed = [] if here.emulated else time_exchanges(shape, here, getattr(torch, dtype), args.rounds)
        wrong = [one for of_rank in here.gather(counted) for one in of_rank if not one.exact]
        wrong_sent = [one for one in sent if not one.exact]
        progress_line("", here)
        if here.rank == 0:
            report(
                args,
                counted,
                sent,
                timed,
                [*wrong, *wrong_sent],
                setting(shape, here, dtype),
                clock_name(args, here.device),
            )
    return 1 if wrong or wrong_sent else 0


def time_exchanges(shape, here, dtype, rounds):
    """The three comparisons, each with its title.  Every rank must call it."""
    place, found = (shape, here, dtype), []
    for title, run, times in (
        # An exchange alone is over in no time, so it is timed more often.
        ("Same bytes", partial(compare_collectives, *place), 10 * rounds),
        ("Backward, tensor parallel", partial(compare_overlap, *place, sequence_parallel=False), rounds),
        ("Backward, tensor + sequence", partial(compare_overlap, *place, sequence_parallel=True), rounds),
    ):
        found.append((title, run(rounds=times, on_round=lambda n: progress_line(f"{title}: round {n}", here))))
    return found


def report(args, counted, sent, timed, wrong, where, clock) -> None:
    """Print the counts, the sockets' bytes and the comparisons, and write the file that is asked for."""
    console = lab_console()
    console.print(exchanges_table(counted, f"Exchanges: {where}"))
    if sent:
        console.print(sent_table(sent))
        console.print(GLOO, highlight=False)
    for one in wrong:
        console.print(f"[bold red]{one.difference}", highlight=False)
    if not wrong:
        console.print("Every number, kind and byte agrees with the formulas.", highlight=False)
    for sentence in compared_lines(timed):
        console.print(sentence, highlight=False)
    if timed and args.device == "cuda":
        queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "torch's default")
        console.print(
            f"CUDA_DEVICE_MAX_CONNECTIONS: {queues}. Megatron sets 1, so that an exchange starts before the", end=" "
        )
        console.print("product that hides it: run this once with 1 in the environment and once without.")
    console.print(
        f"Times: medians of {args.rounds} rounds, {clock}."
        if timed
        else "One emulated rank exchanges nothing, so nothing is timed.",
        highlight=False,
    )
    if args.json:
        document = (
            [asdict(one) for one in counted]
            + [{"on_sockets": one.name, **asdict(one)} for one in sent]
            + [{"comparison": title, **asdict(one)} for title, one in timed]
        )
        write_text(args.json, json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
