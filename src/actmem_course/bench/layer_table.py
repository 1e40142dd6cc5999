"""What labs/measure_table2.py and labs/measure_today.py share: from the command line to the table and the file."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console

from actmem.rows import Row
from actmem_course.arguments import ELEMENT_SIZES, LabParser, add_json_argument
from actmem_course.files import check_files, write_text
from actmem_course.process import lab_console
from actmem_course.ranks import Ranks, add_rank_arguments, check_ranks, ranks
from actmem_course.results import Table2Result
from actmem_course.show.tables import extras_table, table2_table


@dataclass(frozen=True)
class LayerTable:
    """A table with a line for each configuration of one layer.

    shape_from(args), title(args, shape): of the command line.  check(args, shape, ranks): raises ConfigError if
    that many ranks can't measure it.  check_memory(args, shape, element_size, ranks_here, memory_bytes): raises it if
    real tensors don't fit.  measure(args, shape, ranks, dtype, on_configuration): this rank's results.
    extras(args, shape, ranks): the rows that the formulas leave out, with their reasons.
    """

    shape_from: Callable[[argparse.Namespace], Any]
    title: Callable[[argparse.Namespace, Any], str]
    check: Callable[[argparse.Namespace, Any, int], None]
    check_memory: Callable[[argparse.Namespace, Any, int, int, int], None]
    measure: Callable[[argparse.Namespace, Any, Ranks, torch.dtype, Callable], list[Table2Result]]
    extras: Callable[[argparse.Namespace, Any, Ranks], list[Row]]


def run_layer_table(parser: LabParser, table: LayerTable) -> int:
    """Measure on all ranks and print the table; the exit code: 0 if all agree to the byte, or 1."""
    parser.add_argument(
        "--dtype", choices=tuple(ELEMENT_SIZES), default="bfloat16", help="of the activations (default: bfloat16)"
    )
    add_rank_arguments(parser)
    add_json_argument(parser)
    parser.set_defaults(can_fake_cuda=True)
    args = parser.parse_args()
    with parser.refusing():
        shape = table.shape_from(args)
        size = check_ranks(args, parser.prog)
        table.check(args, shape, size)
        if args.emulate is None and args.device == "cpu":
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            table.check_memory(args, shape, ELEMENT_SIZES[args.dtype], int(os.environ["LOCAL_WORLD_SIZE"]), memory)
        check_files(args, "json")

    torch.manual_seed(1234)
    with ranks(args) as here:
        screen = Console(stderr=True, quiet=here.rank > 0)
        with screen.status("measuring") as status:
            own = table.measure(
                args, shape, here, getattr(torch, args.dtype), lambda row: status.update(f"measuring {row.name}")
            )
        results = [result for of_rank in here.gather(own) for result in of_rank]
        if here.rank == 0:
            _report(args, table, shape, here, results)
    return 0 if all(result.exact for result in results) else 1


def _report(args: argparse.Namespace, table: LayerTable, shape: Any, here: Ranks, results: list[Table2Result]) -> None:
    """Print the table, of each configuration the worst rank, and write the file if one is asked for."""
    how = f"emulated rank 0 of {here.size}" if here.emulated else f"{here.size} ranks"
    if here.device == "cuda" and not torch.cuda.is_available():
        how += " (fake tensors, an H100's kernels)"
    title = f"{table.title(args, shape)}, {args.dtype}\n{how} on {here.device}, torch {version('torch')}"
    console = lab_console()
    console.print(table2_table(worst_by_configuration(results), title=title))
    if extras := table.extras(args, shape, here):
        console.print(extras_table(extras))
    wrong = [result for result in results if not result.exact]
    for result in wrong:
        console.print(f"{result.configuration}, rank {result.rank}:\n{result.disagreement}")
    verdict = f"{len(results) - len(wrong)} of {len(results)} measurements agree with the formulas to the byte"
    console.print(verdict if not wrong else f"[bold red]{verdict}")
    if args.json:
        write_text(args.json, json.dumps([asdict(result) for result in results], indent=1) + "\n")


def worst_by_configuration(results: list[Table2Result]) -> list[Table2Result]:
    """For each configuration the rank that is furthest off, or else the one that holds most."""
    worst: dict[str, Table2Result] = {}
    for result in results:
        kept = worst.setdefault(result.configuration, result)
        if _badness(result) > _badness(kept):
            worst[result.configuration] = result
    return list(worst.values())


def _badness(result: Table2Result) -> tuple:
    return not result.exact, abs(result.difference_bytes), result.measured_bytes
