"""python labs/measure_runs.py

Compare GPU memory that others logged with what a formula alone predicts. First pairs of runs from Megatron-LM's own
tests on NVIDIA's GPUs. The two runs of a pair differ in one setting: the difference of their logged bytes is compared
with the formula for that setting. Then 18 runs of a 1.1B Llama under nanotron: the logged peak is compared with a
formula of what nanotron's code keeps in memory. No constant is fitted.
Exit code 0 if every pair is apart from its formula by a few one-number tensors at most, and every run by 0.1% of its
peak at most; 1 if any is not; 2 on wrong use. Needs no GPU.
"""

import sys

from rich.table import Column, Table

from actmem_course.files import check_files
from actmem_course.lab_tools.options import lab_parser
from actmem_course.lab_tools.output import write_rows
from actmem_course.lab_tools.tables import numbers, red_if, table, words
from actmem_course.others.logged_pairs import BLOCK_BYTES, MOST_NUMBERS, LoggedPair, logged_pairs
from actmem_course.others.nanotron import NanotronRun, nanotron_runs
from actmem_course.process import lab
from actmem_tools.command_line import screen

#: How far a run's peak may be from the logged one.
LIMIT_PERCENT = 0.1


@lab
def main() -> int:
    parser = lab_parser("measure_runs.py", __doc__ or "")
    args = parser.parse_args()
    with parser.refusing():
        check_files(args, "json")
    pairs, runs = logged_pairs(), nanotron_runs()
    console = screen()
    console.print(pairs_table(pairs), "layer: 34sbh + 5as²b + 16sb\n", runs_table(runs), highlight=False)
    equal = sum(not pair.apart_bytes for pair in pairs)
    explained = sum(pair.explained for pair in pairs)
    near = sum(abs(run.difference_percent) <= LIMIT_PERCENT for run in runs)
    console.print(
        f"{equal} of {len(pairs)} pairs equal to the byte, {explained - equal} up to {MOST_NUMBERS} tensors of one "
        f"number, in blocks of {BLOCK_BYTES} B; {near} of {len(runs)} runs within {LIMIT_PERCENT}%",
        highlight=False,
    )
    write_rows(args.json, 0, results(pairs, runs))
    return 0 if explained == len(pairs) and near == len(runs) else 1


def pairs_table(pairs: list[LoggedPair]) -> Table:
    """Make a table with a line for each pair of logged runs that differ in one setting.

    Its columns are the setting with the formula below it, the GPU, by how many bytes the activations of the two runs
    differ by formula and as logged, and logged minus formula.

    Args:
        pairs: the pairs, from ``logged_pairs``.
    """
    compared = table("Two runs of Megatron-LM's tests: by how many bytes their activations differ", *columns("GPU"))
    for pair in pairs:
        cells = (f"{pair.formula_bytes:,}", f"{pair.logged_bytes:,}", f"{pair.apart_bytes:,}")
        label = f"{pair.what}\n[dim]  {pair.formula}[/]"
        compared.add_row(label, pair.gpu, *cells, style=red_if(not pair.explained))
    return compared


def runs_table(runs: list[NanotronRun]) -> Table:
    """Make a table with a line for each run.

    Its columns are the run's sizes, the moment of the step at which rank 0 is predicted to hold most (such as "loss"),
    the predicted and the logged peak in MiB, and the difference in percent.

    Args:
        runs: the runs, from ``nanotron_runs``.
    """
    compared = table("1.1B Llama under nanotron, H100s: peak of rank 0, MiB", *columns("at its peak in"))
    for run in runs:
        cells = (f"{run.predicted_mib:,.2f}", f"{run.logged_mib:,.2f}", f"{run.difference_percent:+.3f}%")
        wrong = abs(run.difference_percent) > LIMIT_PERCENT
        compared.add_row(run.setting, run.fullest[0], *cells, style=red_if(wrong))
    return compared


def columns(second: str) -> list[Column]:
    """Return the five columns that both tables have.

    Args:
        second: the heading of the second column, in which the tables differ.
    """
    return [words(""), words(second), *map(numbers, ("by formula", "logged", "apart"))]


def results(pairs: list[LoggedPair], runs: list[NanotronRun]) -> dict:
    """Make the dict that --json writes.

    Args:
        pairs: the pairs, from ``logged_pairs``.
        runs: the runs, from ``nanotron_runs``.

    Returns: a dict with these keys:
        "pairs": a dict for each pair of logged runs: the fields of ``LoggedPair``; "formula_bytes", by how many bytes
            the two runs should differ; "apart_bytes", the logged difference minus the formula's.
        "runs": a dict for each run of nanotron: "setting", its sizes; "logged_mib"; "predicted_bytes", the bytes of
            each part at the predicted peak; and "difference_percent".
    """
    of_pairs = [{**vars(pair), "formula_bytes": pair.formula_bytes, "apart_bytes": pair.apart_bytes} for pair in pairs]
    of_runs = [
        {
            "setting": run.setting,
            "logged_mib": run.logged_mib,
            "predicted_bytes": run.fullest[1],
            "difference_percent": run.difference_percent,
        }
        for run in runs
    ]
    return {"pairs": of_pairs, "runs": of_runs}


if __name__ == "__main__":
    sys.exit(main())
