"""torchrun --nproc-per-node 2 labs/measure_parity.py

One layer shared by all ranks against the same layer on one: output and every gradient in
float64, the exchanges of forward and of backward, and the gradients that each rank has in part.
Exit code 0 if all numbers agree, 1 if any does not, 2 on wrong use.
"""

import json
import sys
from dataclasses import asdict

from rich.console import Console

from actmem_course.arguments import LabParser, add_json_argument, add_shape_arguments, shape_from
from actmem_course.bench.measure_parity import LARGEST_ERROR, check_parity, measure_parity
from actmem_course.files import check_files, write_text
from actmem_course.process import lab
from actmem_course.ranks import add_rank_arguments, check_ranks, ranks
from actmem_course.show.text import text_table


@lab
def main() -> int:
    parser = LabParser(prog="measure_parity.py", description=__doc__.split("\n\n")[1])
    add_shape_arguments(parser)
    add_rank_arguments(parser, emulate=False)
    add_json_argument(parser)
    args = parser.parse_args()
    with parser.refusing():
        shape = shape_from(args)
        check_parity(shape, check_ranks(args, parser.prog))
        check_files(args, "json")

    with ranks(args) as here:
        screen = Console(stderr=True, quiet=here.rank > 0)
        with screen.status("measuring") as status:
            own = measure_parity(shape, here, lambda form: status.update(f"measuring {form}"))
        results = [result for of_rank in here.gather(own) for result in of_rank]
        if here.rank == 0:
            report(args, results)
    return 0 if all(result.exact for result in results) else 1


def report(args, results) -> None:
    """Print a line for each form and rank, and write the file if one is asked for."""
    header = ("form", "rank", "largest error", "exchanges forward", "backward", "partial gradients")
    lines = [
        (
            r.form,
            r.rank,
            f"{r.largest_error:.1e}",
            sum(r.forward.values()),
            sum(r.backward.values()),
            len(r.partial_gradients),
        )
        for r in results
    ]
    print(text_table(header, lines, " rrrrr"))
    agree = sum(result.exact for result in results)
    print(f"{agree} of {len(results)} agree with the unsharded layer to {LARGEST_ERROR}")
    if args.json:
        write_text(args.json, json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
