"""python labs/measure_runs.py

GPU runs that others published, with the peak that each logged, beside the peak that we predict from what
the framework's code keeps: 18 runs of a 1.1B Llama under nanotron, and of torchtitan's table what we can
count. No constant is fitted to them. Then published step times beside those of the planner's time model, and
the paper's own plans beside the fastest of wider and wider searches. --calculators: what public memory
calculators print instead, beside counted bytes. --megatron: instead, the memory that NVIDIA's own CI logged
for Megatron-LM's functional tests, predicted tensor by tensor on a model of torch's allocator.
Exit code 0 if every run is within its limit, 1 if any is not, 2 on wrong use. No GPU needed.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from actmem.config import ConfigError
from actmem_course.arguments import LabParser, add_json_argument
from actmem_course.bench.measure_calculators import measure_calculators, sequence_results
from actmem_course.bench.measure_runs import (
    measure_runs,
    paper_choice_results,
    predict_rows,
    read_rows,
    result_of_row,
    step_time_results,
)
from actmem_course.files import check_files, replacing, write_text
from actmem_course.others.golden import GOLDEN, GoldenResult, experiments, predict, read_golden
from actmem_course.process import lab, lab_console
from actmem_course.show.golden_table import bill_table, experiments_table, golden_summary, golden_table
from actmem_course.show.measured import runs_figure
from actmem_course.show.tables import (
    calculators_table,
    choices_table,
    parts_table,
    reserved_table,
    runs_table,
    times_table,
)


@lab
def main() -> int:
    parser = LabParser(prog="measure_runs.py", description=__doc__.split("\n\n")[1])
    add_json_argument(parser)
    parser.add_argument(
        "--rows",
        type=Path,
        metavar="FILE",
        help="predict these runs of the 1.1B Llama instead: a JSON list of objects gpus, dp, tp, pp, mbz, peak_allocated_mib",
    )
    parser.add_argument(
        "--calculators",
        action="store_true",
        help="instead of runs: what public calculators print for table 2 and one of the runs, beside counted bytes",
    )
    parser.add_argument(
        "--megatron",
        action="store_true",
        help="instead: the memory that NVIDIA's CI logged for Megatron-LM's tests, and what its code keeps; --rows takes a table with columns case, gpu, arguments, peak_bytes, held_bytes",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the figure (needs plotly)")
    args = parser.parse_args()
    with parser.refusing():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise ConfigError("started by torchrun", f"needs a single process: python labs/{parser.prog}")
        if args.calculators and (args.rows or args.html):
            raise ConfigError("calculators", "it has no rows and no page of its own: leave out --rows and --html")
        if args.megatron and (args.calculators or args.html):
            raise ConfigError("megatron", "it has no page, and no calculators: leave out --html and --calculators")
        check_files(args, "json", "html")
        if args.megatron:
            return show_megatron(args.rows, args.json)
        if args.calculators:
            return show_calculators(args.json)
        times, choices = [], []
        if args.rows:
            predicted = predict_rows(read_rows(args.rows))
            results = [result for row in predicted if (result := result_of_row(row))]
        else:
            results = measure_runs()
            times = step_time_results()
            choices = paper_choice_results()
            predicted = [as_json(result) for result in results + times] + [asdict(result) for result in choices]

    console = lab_console()
    judged = [result for result in results if result.within_limit is not None]
    if judged:
        console.print(runs_table(judged))
        console.print(parts_table(judged))
    if reserved := [result for result in results if result.printed_kind == "reserved"]:
        console.print(reserved_table(reserved))
    if times:
        console.print(times_table(times))
        console.print(choices_table(choices))
    if args.json:
        write_text(args.json, json.dumps(predicted, ensure_ascii=False, indent=1) + "\n")
    if args.html and judged:
        from actmem_course.show.measured import write_page  # plotly is loaded only to draw

        with replacing(args.html) as beside:
            write_page(runs_figure(judged), beside)
        console.print(f"wrote {args.html}", highlight=False)
    good = [result for result in judged if result.within_limit]
    if judged:
        worst = max(abs(result.difference_percent or 0) for result in judged)
        limit = judged[0].limit_percent
        console.print(
            f"{len(good)} of {len(judged)} runs within {limit}% of what they logged; worst {worst:.3f}%",
            highlight=False,
        )
    else:
        console.print(f"{len(predicted)} runs predicted, none with a peak to compare with", highlight=False)
    return 0 if len(good) == len(judged) else 1


def show_megatron(rows_file: Path | None, json_file: Path | None) -> int:
    """NVIDIA's rows or the file's, predicted; the bill of one run and the pairs that differ in one thing."""
    results = [predict(row) for row in read_golden(rows_file or GOLDEN)]
    found = experiments(results)
    console = lab_console()
    console.print(golden_table(results))
    if played := sorted((r for r in results if r.played), key=lambda r: not r.row.unfused):
        console.print(bill_table(played[0]))
    if found:
        console.print(experiments_table(found))
    for line in golden_summary(results, found):
        console.print(line, highlight=False)
    if json_file:
        write_text(json_file, json.dumps([golden_json(r) for r in results], ensure_ascii=False, indent=1) + "\n")
    return 0 if all(abs(r.peak_percent) <= r.limit_percent for r in results if r.peak_percent is not None) else 1


def golden_json(result: GoldenResult) -> dict:
    """A row with its prediction, and the lines of its peak."""
    row = result.row
    return {
        "case": row.case,
        "gpu": row.gpu,
        "peak_bytes": row.peak_bytes,
        "held_bytes": row.held_bytes,
        "predicted_peak_bytes": result.predicted_peak_bytes,
        "predicted_held_bytes": result.predicted_held_bytes,
        "kept_apart": row.kept_apart,
        "why_not": result.why_not,
        "lines": dict(result.played.memory.peak_lines) if result.played else {},
    }


def show_calculators(json_file: Path | None) -> int:
    """The table of calculators, how many rows each has right, and the file if one is asked for."""
    rows, sequences = measure_calculators(), sequence_results()
    console = lab_console()
    for results, what in ((rows, "one layer of the 22B model"), (sequences, "one more sequence, counted by GPUs")):
        console.print(calculators_table(results, f"Public calculators: {what}"))
    for name, (source, why) in {result.calculator: (result.source, result.why) for result in rows}.items():
        own = [result for result in rows if result.calculator == name]
        right = sum(result.difference_bytes == 0 for result in own)
        console.print(f"{name}: {right} of {len(own)} rows to the byte; {why} ({source})", highlight=False)
    for result in sequences:
        console.print(f"{result.calculator}: {result.difference_percent:+.2f}%; {result.why}", highlight=False)
    if json_file:
        objects = [asdict(r) | {"difference_bytes": r.difference_bytes} for r in rows + sequences]
        write_text(json_file, json.dumps(objects, ensure_ascii=False, indent=1) + "\n")
    return 0


def as_json(result) -> dict:
    """All fields and the computed ones."""
    computed = {"difference_percent": result.difference_percent}
    if hasattr(result, "within_limit"):
        computed["within_limit"] = result.within_limit
    return {**asdict(result), **computed}


if __name__ == "__main__":
    sys.exit(main())
