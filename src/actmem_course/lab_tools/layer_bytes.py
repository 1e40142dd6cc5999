"""Compare predicted and measured bytes of one layer in several configurations, and print the results as a table.

A row (``actmem.rows.Row``) has the bytes of one saved tensor; its term is the tensor's name. A configuration is a
combination of parallelism and recomputation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from actmem.rows import Row, compare, total
from actmem_course.lab_tools.output import WRONG
from actmem_course.lab_tools.tables import numbers, red_if, table, two_lines, words


def layer_result(
    configuration: str,
    formula: str,
    tensor_parallel_size: int,
    rank: int,
    predicted: list[Row],
    extra: list[Row],
    measured: list[Row],
) -> dict[str, Any]:
    """Make the dict that labs write to JSON for one configuration on one rank.

    Args:
        configuration: a row of the paper's table 2 by its name, such as "tensor+sequence".
        formula: the predicted bytes divided by sbh, as a formula in letters, such as "10 + 24/t".
        tensor_parallel_size: t.
        rank: the number of the rank, from 0.
        predicted: predicted rows of the tensors that the paper counts.
        extra: predicted rows of the tensors that the paper leaves out.
        measured: rows of all tensors that autograd saved.

    Returns:
        The first four arguments by their names, and the dict that ``compared`` makes of the other three:
        "predicted_bytes", "extra_bytes", "measured_bytes", "difference_bytes", "exact" and "disagreement".
    """
    place = {"configuration": configuration, "formula": formula, "tensor_parallel_size": tensor_parallel_size}
    return {**place, "rank": rank, **compared(predicted, extra, measured)}


def compared(predicted: list[Row], extra: list[Row], measured: list[Row]) -> dict[str, Any]:
    """Compare predicted and measured bytes, tensor by tensor.

    Args:
        predicted: rows of the tensors that the paper counts.
        extra: predicted rows of the tensors that the paper leaves out.
        measured: rows of all tensors that autograd saved.

    Returns:
        ``predicted_bytes``, ``extra_bytes``, ``measured_bytes``: the totals of the three arguments.
        ``difference_bytes``: measured minus the sum of predicted and extra.
        ``exact``: whether predicted and measured bytes are equal for each term.
        ``disagreement``: lines of text that list the terms whose bytes differ; "" if none does.
    """
    comparison = compare(predicted + extra, measured)
    return {
        "predicted_bytes": total(predicted),
        "extra_bytes": total(extra),
        "measured_bytes": total(measured),
        "difference_bytes": comparison.difference,
        "exact": comparison.exact,
        "disagreement": "" if comparison.exact else comparison.describe(),
    }


def print_layers(screen: Console, rows: list[dict[str, Any]], title: str, extra: list[Row]) -> bool:
    """Print the results of several configurations as a table.

    Below the table it prints why the paper leaves out the tensors of ``extra``, and the terms whose measured bytes
    differ from the prediction.

    Args:
        screen: the console to print on.
        rows: dicts from ``layer_result``, of all ranks.
        title: the table's title.
        extra: predicted rows of the tensors that the paper leaves out.

    Returns: whether all measurements equal their predictions.
    """
    screen.print(layers_table(rows, title))
    if extra:
        reasons = table("", "extra", words("why it is kept, and why the paper leaves it out"))
        for term, reason in {row.term: row.extra for row in extra if row.extra}.items():
            reasons.add_row(term, reason)
        screen.print(reasons)
    wrong = [row for row in rows if not row["exact"]]
    for row in wrong:
        screen.print(f"{row['configuration']}, rank {row['rank']}:\n{row['disagreement']}", style=WRONG, markup=False)
    agree = f"{len(rows) - len(wrong)} of {len(rows)} measurements agree with the formulas to the byte"
    screen.print(agree, style=WRONG if wrong else None)
    return not wrong


def layers_table(rows: Iterable[Mapping[str, Any]], title: str) -> Table:
    """Make a table of predicted, extra and measured bytes of a layer, with one line for each configuration.

    A line shows the configuration on one rank: the rank with the largest difference between measured and predicted
    bytes, or, if there is no difference on any rank, the rank with the most measured bytes.

    Args:
        rows: dicts from ``layer_result``, of all configurations and ranks.
        title: the table's title.
    """
    layers = table(title, "bytes per layer and rank", *map(numbers, ("predicted", "extra", "measured", "diff.")))
    ranks: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        ranks.setdefault(row["configuration"], []).append(row)
    for name, rank_rows in ranks.items():
        row = max(rank_rows, key=lambda one: (not one["exact"], abs(one["difference_bytes"]), one["measured_bytes"]))
        head, plus, last = name.rpartition("+")
        label = name if len(name) <= 25 else f"{head}\n  {plus}{last}"
        cells = (f"{row[f'{kind}_bytes']:,}" for kind in ("predicted", "extra", "measured", "difference"))
        layers.add_row(two_lines(label, f"  sbh({row['formula']})"), *cells, style=red_if(not row["exact"]))
    return layers
