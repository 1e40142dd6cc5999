"""torchrun --nproc-per-node 2 labs/measure_table2.py

Table 2 of 2205.05198, measured: for each of the six configurations, the bytes that one
transformer layer keeps for backward, by formula and by counting what autograd really holds.
Exit code 0 if all agree to the byte, 1 if any does not, 2 on wrong use.
"""

import json
import os
import sys
from dataclasses import asdict
from importlib.metadata import version

import torch
from rich.console import Console

from actmem_course.arguments import (
    ELEMENT_SIZES,
    LabParser,
    add_json_argument,
    add_shape_arguments,
    shape_from,
)
from actmem_course.bench.measure_table2 import (
    check_memory,
    check_table2,
    extras_of_table2,
    measure_table2,
    worst_by_configuration,
)
from actmem_course.files import check_files, write_text
from actmem_course.process import lab, lab_console
from actmem_course.ranks import add_rank_arguments, check_ranks, ranks
from actmem_course.show.tables import extras_table, table2_table


@lab
def main() -> int:
    parser = LabParser(prog="measure_table2.py", description=__doc__.split("\n\n")[1])
    add_shape_arguments(parser)
    parser.add_argument(
        "--dtype", choices=tuple(ELEMENT_SIZES), default="bfloat16", help="of the activations (default: bfloat16)"
    )
    add_rank_arguments(parser)
    add_json_argument(parser)
    args = parser.parse_args()
    with parser.refusing():
        shape = shape_from(args)
        size = check_ranks(args, parser.prog)
        check_table2(shape, size)
        if args.emulate is None and args.device != "cuda" and not torch.cuda.is_available():
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            check_memory(shape, ELEMENT_SIZES[args.dtype], int(os.environ["LOCAL_WORLD_SIZE"]), memory)
        check_files(args, "json")

    torch.manual_seed(1234)
    with ranks(args) as here:
        screen = Console(stderr=True, quiet=here.rank > 0)
        with screen.status("measuring") as status:
            own = measure_table2(
                shape, here, getattr(torch, args.dtype), lambda row: status.update(f"measuring {row.name}")
            )
        results = [result for of_rank in here.gather(own) for result in of_rank]
        if here.rank == 0:
            report(args, shape, here, results)
    return 0 if all(result.exact for result in results) else 1


def report(args, shape, here, results) -> None:
    """Print the table, rank by rank worst, and write the file if one is asked for."""
    a, b, h, s = shape.letters()
    how = f"emulated rank 0 of {here.size}" if here.emulated else f"{here.size} ranks"
    title = f"Table 2 measured: s={s} b={b} h={h} a={a}, {args.dtype}\n{how} on {here.device}, torch {version('torch')}"
    console = lab_console()
    console.print(table2_table(worst_by_configuration(results), title=title))
    console.print(extras_table(extras_of_table2(shape, here, ELEMENT_SIZES[args.dtype])))
    wrong = [result for result in results if not result.exact]
    for result in wrong:
        console.print(f"{result.configuration}, rank {result.rank}:\n{result.disagreement}")
    verdict = f"{len(results) - len(wrong)} of {len(results)} measurements agree with the formulas to the byte"
    console.print(verdict if not wrong else f"[bold red]{verdict}")
    if args.json:
        write_text(args.json, json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
