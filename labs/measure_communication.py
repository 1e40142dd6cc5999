"""torchrun --nproc-per-node 2 labs/measure_communication.py

What the ranks of one transformer layer exchange (2205.05198 section 4.2): number, kind and bytes of
the collectives in every mode, by formula and counted; what the ranks' sockets really sent for them;
and the time of one all-reduce against a reduce-scatter and an all-gather of the same bytes.
Exit code 0 if every count agrees with the formula, 1 if any does not, 2 on wrong use.
"""

import sys
from dataclasses import asdict

import torch

from actmem.config import Parallel, check_layer
from actmem_course.arguments import add_shape_arguments, shape_from
from actmem_course.bench.measure_communication import TORCHS, compare_collectives, count_exchanges, measure_sent
from actmem_course.bench.measure_speed import timed_shape
from actmem_course.bench.runner import Measurement
from actmem_course.bench.timing import LAYER, add_timing_arguments, check_timing, setting
from actmem_course.others.ring import HEADER_BYTES, MESSAGES
from actmem_course.process import lab
from actmem_course.ranks import add_rank_arguments, check_ranks
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
        counted, sent, timed = count_exchanges(*place), measure_sent(*place), None
        if not here.emulated:
            # An exchange is over in no time, so it is timed more often.
            timed = compare_collectives(*place, rounds=10 * args.rounds, on_round=lambda n: run.progress(f"round {n}"))
        wrong = [one for one in run.gathered(counted) + sent if not one.exact]
        run.progress()
        run.show(exchanges_table(counted, f"Exchanges: {setting(shape, here, dtype)}"))
        run.show(*((sent_table(sent), GLOO) if sent else ()))
        run.wrong(*(one.difference for one in wrong))
        run.show(*(() if wrong else ("Every number, kind and byte agrees with the formulas.",)))
        if timed:
            run.show(
                f"Same bytes: {compared_line(timed)}", f"Times: medians of {10 * args.rounds} rounds, {run.clock}."
            )
        else:
            run.show("One emulated rank exchanges nothing, so nothing is timed.")
        run.write([
            *counted,
            *({"on_sockets": one.name, **asdict(one)} for one in sent),
            *([{"comparison": "Same bytes", **asdict(timed)}] if timed else []),
        ])  # fmt: skip
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
