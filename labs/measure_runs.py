"""python labs/measure_runs.py

GPU runs that others published, with the peak that each logged, beside the peak that we predict from what
the framework's code keeps: 18 runs of a 1.1B Llama under nanotron. No constant is fitted to them. Then published step times beside those of the planner's time model, and
published plans beside the fastest that their code could run. --calculators: what public memory
calculators print instead, beside counted bytes. --megatron: instead, the memory that NVIDIA's own CI logged
for Megatron-LM's functional tests, predicted tensor by tensor on a model of torch's allocator; with --here,
those whose model the course has are run on this machine too, as one emulated rank, and counted.
Exit code 0 if every run is within its limit, 1 if any is not, 2 on wrong use. No GPU needed.
"""

import sys
from pathlib import Path

from actmem.config import ConfigError
from actmem_course.bench.golden_here import count_here
from actmem_course.bench.measure_runs import (
    choice_results,
    measure_runs,
    predicted_rows,
    step_time_results,
)
from actmem_course.bench.predictors import kernel_slopes, leaderboard, measure_calculators, sequence_results
from actmem_course.bench.runner import Measurement
from actmem_course.figures.ch10_plan_a_model import runs_figure
from actmem_course.others.golden import GOLDEN, LIMITS, GoldenResult, experiments, predict, read_golden
from actmem_course.process import lab
from actmem_course.results import plain
from actmem_course.show import tables

ROWS = "predict these runs of the 1.1B Llama instead: a JSON list of objects gpus, dp, tp, pp, mbz, peak_allocated_mib"
CALCULATORS = "instead of runs: what public calculators print for table 2 and one of the runs, beside counted bytes"
MEGATRON = "instead: the memory that NVIDIA's CI logged for Megatron-LM's tests, and what its code keeps; --rows takes a table with columns case, gpu, arguments, peak_bytes, held_bytes"
HERE = "with --megatron: count the same models on this machine, and set them beside what the GPUs logged"


@lab
def main() -> int:
    run = Measurement(__doc__)
    run.option("--rows", type=Path, metavar="FILE", help=ROWS)
    run.option("--calculators", action="store_true", help=CALCULATORS)
    run.option("--megatron", action="store_true", help=MEGATRON)
    run.option("--here", action="store_true", help=HERE)
    run.page()
    with run.asked() as args:
        run.alone()
        if args.calculators and (args.rows or args.html):
            raise ConfigError("calculators", "it has no rows and no page of its own: leave out --rows and --html")
        if args.megatron and (args.calculators or args.html):
            raise ConfigError("megatron", "it has no page, and no calculators: leave out --html and --calculators")
        if args.here and not args.megatron:
            raise ConfigError("here", "goes with --megatron")
        if args.megatron:
            golden = [predict(row) for row in read_golden(args.rows or GOLDEN)]
        elif args.rows:
            rows, results = predicted_rows(args.rows)
    if args.megatron:
        return show_here(run, golden) if args.here else show_megatron(run, golden)
    if args.calculators:
        return show_calculators(run)

    times, choices = [], []
    if not args.rows:
        results, times, choices = measure_runs(), step_time_results(), choice_results()
    if results:
        run.show(tables.runs_table(results), tables.parts_table(results))
    if times:
        run.show(tables.times_table(times), tables.choices_table(choices))
        run.show(*(f"{choice.setting}: {choice.reason}" for choice in choices if choice.reason))
    run.write(rows if args.rows else [*results, *times, *choices])
    if not results:
        run.show(f"{len(rows)} runs predicted, none with a peak to compare with")
        return 0
    run.draw(lambda: runs_figure(results))
    good = sum(result.within_limit for result in results)
    worst = max(abs(result.difference_percent) for result in results)
    limit = results[0].limit_percent
    run.show(f"{good} of {len(results)} runs within {limit}% of what they logged; worst {worst:.3f}%")
    return 0 if good == len(results) else 1


def show_megatron(run: Measurement, results: list[GoldenResult]) -> int:
    """NVIDIA's rows or the file's, predicted; the bill of one run and the pairs that differ in one thing."""
    found = experiments(results)
    run.show(tables.golden_table(results))
    if played := sorted((r for r in results if r.played), key=lambda r: list(LIMITS).index(r.row.kind)):
        run.show(tables.megatron_bill_table(played[0]))
    if found:
        run.show(tables.experiments_table(found))
    run.show(tables.reasons_table(results), *tables.golden_summary(results, found))
    names = ("case", "gpu", "peak_bytes", "held_bytes")
    lines = [r.played.memory.peak_lines if r.played else {} for r in results]
    pairs = [[pair for pair in found if pair.more is r] for r in results]
    run.write([
        {name: getattr(r.row, name) for name in names} | plain(r) | {"lines": own, "pairs": more}
        for r, own, more in zip(results, lines, pairs)
    ])  # fmt: skip
    return 0 if all(r.within_limit for r in results) else 1


def show_here(run: Measurement, results: list[GoldenResult]) -> int:
    """NVIDIA's runs on this machine: logged, counted, and line by line why the two differ."""
    with run.status("counting NVIDIA's tests on an emulated rank"):
        counted = count_here(results)
    if counted:
        run.show(
            tables.here_table(counted),
            tables.here_lines_table(min(counted, key=lambda one: one.golden.row.gpu)),
            *tables.here_summary(counted),
        )
    else:
        run.show("no row has the paper's own layer, a peak and held bytes")
    run.write([{"case": one.golden.row.case, "gpu": one.golden.row.gpu, **plain(one)} for one in counted])
    return 0 if all(one.golden.within_limit for one in counted) else 1


def show_calculators(run: Measurement) -> int:
    """The table of calculators, how many rows each has right, a leaderboard, the slopes of two kernels."""
    rows, sequences = measure_calculators(), sequence_results()
    for results, what in ((rows, "one layer of the 22B model"), (sequences, "one more sequence, counted by GPUs")):
        run.show(tables.calculators_table(results, f"Public calculators: {what}"))
    for name, (source, why) in {result.calculator: (result.source, result.why) for result in rows}.items():
        own = [result for result in rows if result.calculator == name]
        right = sum(result.difference_bytes == 0 for result in own)
        run.show(f"{name}: {right} of {len(own)} rows to the byte; {why} ({source})")
    for result in sequences:
        run.show(f"{result.calculator}: {result.difference_percent:+.2f}%; {result.why}")
    lines, slopes = leaderboard(), kernel_slopes()
    run.show(tables.leaderboard_table(lines), tables.slopes_table(slopes))
    run.write([*rows, *sequences, *lines, *slopes])
    return 0


if __name__ == "__main__":
    sys.exit(main())
