"""torchrun --nproc-per-node 2 labs/measure_communication.py

What the ranks of one transformer layer exchange (2205.05198 section 4.2): number, kind and bytes of
the collectives in every mode, by formula and counted; what the ranks' sockets really sent for them;
the time of one all-reduce against a reduce-scatter and an all-gather of the same bytes; and how much of
backward's exchanges the matrix products hide, by its time with and without overlap.
Exit code 0 if every count agrees with the formula, 1 if any does not, 2 on wrong use.
"""

import os
import sys

import torch

from actmem.config import Parallel, check_layer
from actmem_course.arguments import add_shape_arguments, shape_from
from actmem_course.bench.measure_communication import (
    TORCHS,
    compare_collectives,
    compare_overlap,
    count_exchanges,
    measure_sent,
)
from actmem_course.bench.measure_speed import timed_shape
from actmem_course.bench.runner import Measurement
from actmem_course.bench.timing import LAYER, add_timing_arguments, check_timing, setting
from actmem_course.others.ring import HEADER_BYTES, MESSAGES
from actmem_course.process import lab
from actmem_course.ranks import add_rank_arguments, check_ranks
from actmem_course.results import TimedPair, plain
from actmem_course.show.tables import compared_line, exchanges_table, sent_table

GLOO = (
    f"Headers: {HEADER_BYTES} bytes before each of gloo's messages, {MESSAGES} messages for each piece of data. {TORCHS.capitalize()} "
    "over gloo is an all-reduce that forgets the rest; ours sends only what is kept (parallel/collectives.py)."
)


@lab
def main() -> int:
    run = Measurement(__doc__)
    add_shape_arguments(run.parser, LAYER)
    add_rank_arguments(run.parser)
    add_timing_arguments(run.parser)
    with run.asked() as args:
        size = check_ranks(args, run.parser.prog)
        dtype = check_timing(args)
        if args.emulate is None:
            shape = timed_shape(args, size, dtype)
        else:  # an emulated rank needs no memory: it only counts
            shape = shape_from(args)
            check_layer(shape, Parallel(size, sequence_parallel=True))

    with run.ranks() as here:
        place = (shape, here, getattr(torch, dtype))
        counted, sent = count_exchanges(*place), measure_sent(*place)
        timed = {} if here.emulated else time_exchanges(run, place)
        wrong = [one for one in run.gathered(counted) + sent if not one.exact]
        run.progress()
        run.show(exchanges_table(counted, f"Exchanges: {setting(shape, here, dtype)}"))
        run.show(*((sent_table(sent), GLOO) if sent else ()))
        run.wrong(*(one.difference for one in wrong))
        run.show(*(() if wrong else ("Every number, kind and byte agrees with the formulas.",)))
        if timed:
            run.show(*(f"{title}: {compared_line(one)}" for title, one in timed.items()))
            run.show(f"Times: medians of {args.rounds} rounds, of exchanges alone {10 * args.rounds}; {run.clock}.")
            if args.device == "cuda":
                queues = os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
                run.show(
                    f"CUDA_DEVICE_MAX_CONNECTIONS={queues}: with 1 an exchange starts before the product that hides it."
                )
        else:
            run.show("One emulated rank exchanges nothing, so nothing is timed.")
        run.write([
            *counted,
            *({"on_sockets": one.name, **plain(one)} for one in sent),
            *({"comparison": title, **plain(one)} for title, one in timed.items()),
        ])  # fmt: skip
    return 1 if wrong else 0


def time_exchanges(run: Measurement, place) -> dict[str, TimedPair]:
    """The three comparisons by their titles.  Every rank must call it."""
    rounds, title = run.args.rounds, "Same bytes"

    def say(number: int) -> None:
        run.progress(f"{title}: round {number}")

    # An exchange alone is over in no time, so it is timed more often.
    found = {title: compare_collectives(*place, rounds=10 * rounds, on_round=say)}
    for title, shared in (("Backward, tensor parallel", False), ("Backward, tensor + sequence", True)):
        found[title] = compare_overlap(*place, sequence_parallel=shared, rounds=rounds, on_round=say)
    return found


if __name__ == "__main__":
    sys.exit(main())
