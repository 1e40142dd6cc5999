"""What labs/measure_table2.py and labs/measure_today.py share: from the command line to the table and the file."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from actmem.rows import Row
from actmem_course.arguments import ELEMENT_SIZES
from actmem_course.bench.runner import Measurement
from actmem_course.bench.timing import memory_bytes, ranks_here
from actmem_course.ranks import Ranks, add_rank_arguments, check_ranks
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


def run_layer_table(run: Measurement, table: LayerTable) -> int:
    """Measure on all ranks and print of each configuration the worst rank; the exit code: 0 if all agree to the byte, or 1."""
    run.dtype()
    add_rank_arguments(run.parser)
    run.parser.set_defaults(can_fake_cuda=True)
    with run.asked() as args:
        shape, element_size = table.shape_from(args), ELEMENT_SIZES[args.dtype]
        table.check(args, shape, check_ranks(args, run.parser.prog))
        if args.emulate is None and args.device == "cpu":
            table.check_memory(args, shape, element_size, ranks_here(args), memory_bytes("cpu"))

    with run.ranks() as here:
        with run.status("measuring") as say:
            own = table.measure(args, shape, here, getattr(torch, args.dtype), lambda row: say(f"measuring {row.name}"))
        results = run.gathered(own)
        how = f"emulated rank 0 of {here.size}" if here.emulated else f"{here.size} ranks"
        if here.device == "cuda" and not torch.cuda.is_available():
            how += " (fake tensors, an H100's kernels)"
        title = f"{table.title(args, shape)}, {args.dtype}\n{how} on {here.device}, torch {version('torch')}"
        run.show(table2_table(worst_by_configuration(results), title=title))
        if extras := table.extras(args, shape, here):
            run.show(extras_table(extras))
        wrong = [result for result in results if not result.exact]
        run.show(*(f"{one.configuration}, rank {one.rank}:\n{one.disagreement}" for one in wrong))
        verdict = f"{len(results) - len(wrong)} of {len(results)} measurements agree with the formulas to the byte"
        run.show(f"[bold red]{verdict}" if wrong else verdict)
        run.write(results)
    return 1 if wrong else 0


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
