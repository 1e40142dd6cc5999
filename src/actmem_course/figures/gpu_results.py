"""Draw what was measured on a GPU: the files in labs/results, which labs/measure_gpu.py writes.

Pages of the site don't have these files, so there the figures have no controls.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actmem.formulas.flops import A100_BYTES_PER_SECOND, A100_FLOPS_PER_SECOND
from actmem_course.figures.bars import bar_chart
from actmem_course.figures.checks import Fold
from actmem_course.figures.marks import Drawing, chart, line, scale, words
from actmem_course.figures.style import COMPARED, FILLS, HELD
from actmem_course.figures.units import GIB, exact_text, milliseconds, size_text
from actmem_course.others import paper

#: The folder of results in a checkout; an installed package has none.
RESULTS = Path(__file__).resolve().parents[3] / "labs" / "results"
#: The end of the names of rows that were measured without the limit of memory.
_WITHOUT_LIMIT = ", all of this card"
_SIDES = (FILLS["second number"], FILLS["ours"])
#: For each row of table 4 that recomputes, the row of a result whose second run goes to its end, as the paper's does.
_TO_ITS_END = {
    "selective": "selective, literal",
    "selective + sequence parallel": "selective + SP, literal",
    "full recompute": "full recompute, literal",
}
_STRANGERS = {"llama_1b": "Llama 3.2 1B", "llama_8b_lora": "Llama 3 8B with LoRA", "gpt_dropout": "GPT with dropout"}

Result = Mapping[str, Any]


def newest(step: str, folder: Path = RESULTS) -> Result:
    """Load the newest results file of labs/measure_gpu.py in which a given measurement was made.

    Args:
        step: The measurement, a key of the file, such as "wall".
        folder: The folder with the results files.

    Returns: the contents of the file, with all measurements, as a dict.

    Raises:
        FileNotFoundError: No file has this measurement.
    """
    results = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    # Of the wall its curve is drawn too: a run that was killed, or one on a small GPU, may have none.
    drawn = "curve" if step == "wall" else "name"
    with_step = [result for result in results if any(row.get(drawn) for row in result.get(step, []))]
    if not with_step:
        raise FileNotFoundError(f"no GPU's results in {folder}: python labs/measure_gpu.py measures them")
    return max(with_step, key=lambda result: result["date"])


def device(result: Result) -> str:
    """Return the GPU's name without its maker, such as ``H200``.

    Args:
        result: A results file, from ``newest``.
    """
    return result["machine"]["device"].removeprefix("NVIDIA ")


def conditions(result: Result) -> str:
    """Return two lines of text that say on which GPU and how results were measured, and that collectives took no time.

    Args:
        result: A results file, from ``newest``.
    """
    machine, ranks = result["machine"], result["settings"]["tensor_parallel_size"]
    return (
        f"One {machine['device']}, torch {machine['torch']}, {result['settings']['dtype']}, as one emulated rank of "
        f"{ranks}:\nkernels and memory are real, collectives send nothing and take no time."
    )


def named(rows: list[dict]) -> dict[str, dict]:
    """Return rows of a results file as a dict by their names.

    Args:
        rows: The rows of one measurement, such as "wall"; each has the key "name".
    """
    return {row["name"]: row for row in rows}


def wall_bars(result: Result) -> Drawing:
    """Draw predicted and measured peak of the 22B model for each combination of methods, with the memory limit.

    Where memory ran out, a text says so in place of the bar of the measured peak.

    Args:
        result: A results file with the measurement "wall".
    """
    rows = named(result["wall"])
    rungs = {
        "no parallelism" if name == "none" else name: row
        for name, row in rows.items()
        if not name.endswith(_WITHOUT_LIMIT)
    }
    limit = next(iter(rungs.values()))["budget_bytes"]
    # One GPU alone would need several times what the axis shows.
    beyond = {
        name: f"{size_text(row['predicted_bytes'])}, beyond this axis"
        for name, row in rungs.items()
        if row["predicted_bytes"] > 2 * limit
    }
    agree = all(bool(row["out_of_memory"]) == (row["predicted_bytes"] > limit) for row in rungs.values())
    fit = sum(not row["out_of_memory"] for row in rungs.values())
    return bar_chart(
        f"{fit} of {len(rungs)} ways fit in {size_text(limit)} on the {device(result)}, "
        f"{'as' if agree else 'not as'} predicted",
        {
            "predicted peak": {name: 0 if name in beyond else row["predicted_bytes"] for name, row in rungs.items()},
            "measured peak": {name: row["peak_bytes"] or 0 for name, row in rungs.items()},
        },
        "22B model, one rank of 8, one training step",
        beside=True,
        fills=_SIDES,
        says={
            "predicted peak": beyond,
            "measured peak": {name: _outcome(row, rows.get(name + _WITHOUT_LIMIT)) for name, row in rungs.items()},
        },
        room_for=limit,
        limit=("limit", limit),
    )


def _outcome(row: dict, without_limit: dict | None) -> str:
    """Return in words where memory ran out, and what the step takes without the limit; "" if it fit."""
    if not row["out_of_memory"]:
        return ""
    where = f"in {row['out_of_memory'].partition(':')[0]}".replace("in building", "while building")
    where = where.replace("the first step", "step 1").replace("the second step", "step 2")
    needs = f", needs {size_text(without_limit['peak_bytes'])}" if without_limit else ""
    return f"out of memory {where}{needs}"


def wall_remainder(result: Result) -> Fold:
    """Return a line that says by how much the 22B model's measured peaks are above the predicted ones.

    A click on the line shows what makes the difference.

    Args:
        result: A results file with the measurement "wall": one step of the model with each combination of methods.
    """
    rows = [row for row in result["wall"] if row["peak_bytes"]]
    shares = [row["peak_bytes"] / row["predicted_bytes"] - 1 for row in rows]
    rest = {
        row["name"].removesuffix(_WITHOUT_LIMIT): row["peak_bytes"]
        - row["predicted_bytes"]
        - sum(row["unbilled"].values())
        for row in rows
    }
    return Fold(
        f"Measured is {min(shares):.2%} to {max(shares):.2%} more than predicted",
        f"Not predicted, but measured in the same run: {', '.join(rows[0]['unbilled'])}. Without them measured minus "
        f"predicted is {', '.join(f'{size_text(size)} ({name})' for name, size in rest.items())}. That is what "
        "kernels take only while they run, which the prediction leaves out too: softmax's backward pass (gradient "
        "times output), the sum over tokens that is a bias's gradient (partial sums), and the loss's count of targets "
        "that aren't ignored (a copy of the mask). Worked out from torch's source, they are all of it, in the "
        "allocator's blocks (tests/tape/test_the_wall.py).",
        prose=True,
    )


def step_curve(result: Result) -> Drawing:
    """Draw the bytes allocated on the GPU over one training step of the 22B model, in milliseconds since its start.

    Args:
        result: A results file with the measurement "wall", of which one row has the curve.
    """
    row = next(row for row in result["wall"] if row.get("curve"))
    times, sizes = zip(*row["curve"])
    static, peak, end = row["static_bytes"], row["peak_bytes"], times[-1]
    at, top = max(row["curve"], key=lambda moment: moment[1])[0], peak // GIB + 2
    return chart(
        f"{size_text(static)} are there before the step;<br>the two passes add at most {size_text(peak - static)}",
        [
            line("allocated", times, [size / GIB for size in sizes], HELD, "%{x:.0f} ms: %{y:.2f} GiB"),
            line("before the step", [0, end], [static / GIB] * 2, COMPARED, exact_text(static), "dash", 2),
            words([0.02 * end], [top], ["forward pass:<br>each layer<br>saves tensors"], 13, "bottom right"),
            words([end], [top], ["backward pass:<br>each spike<br>is a layer"], 13, "bottom left"),
        ],
        f"A line over {end:.0f} ms: from {size_text(static)} allocated memory rises in the forward pass to "
        f"{size_text(peak)} at {at:.0f} ms, and falls back to {size_text(sizes[-1])} in the backward pass.",
        xaxis=scale("milliseconds since the step began", 0, end),
        yaxis=scale("allocated, GiB", static // GIB - 1, top),
    )  # fmt: skip


def table4_bars(result: Result) -> Drawing:
    """Draw the time that recomputation adds to a layer of the 22B model, on the measured GPU and on the paper's.

    Args:
        result: A results file with the measurement "table4".
    """
    rows = named(named(result["table4"])["22B"]["rows"])
    name = device(result)
    # In whole percent, as the paper prints them.
    percent = {row: round(100 * found["over"]["value"]) for row, found in rows.items() if found["over"]}
    here = {row: percent[row] for row in _TO_ITS_END}
    parts = {
        f"{name}, stops early": here,
        f"{name}, recomputes to the end": {row: percent[literal] for row, literal in _TO_ITS_END.items()},
        "the paper's A100s, to the end": {row: paper.TABLE4[row].overhead_percent for row in _TO_ITS_END},
    }
    return bar_chart(
        f"Selective recomputation alone costs {here['selective']}% on one {name}, as a rank whose<br>"
        f"collectives send nothing, {paper.TABLE4['selective'].overhead_percent}% on the paper's 8 A100s",
        parts,
        "time added to one layer of the 22B model",
        "%",
        beside=True,
        fills=(FILLS["ours"], FILLS["second number"], FILLS["others"]),
        says={part: {row: f"{value}%" for row, value in of.items()} for part, of in parts.items()},
    )


def layer_times(result: Result) -> Fold:
    """Return a line that says which share of the time of the 22B model's layer its matmuls alone take.

    A click on the line shows the layer's milliseconds, and how much faster than an A100 the GPU runs matmuls and
    copies.

    Args:
        result: A results file with the measurements "modes", "rates" and "table4".
    """
    modes, (rates,) = named(result["modes"]), result["rates"]
    matmuls = rates["flops_per_second"] / A100_FLOPS_PER_SECOND
    memory = rates["copy_bytes_per_second"] / A100_BYTES_PER_SECOND
    rows = named(named(result["table4"])["22B"]["rows"])
    sequence, plain = rows["sequence parallel"]["over"]["value"], rows["baseline, no recompute"]
    forward, backward = milliseconds(plain["forward_seconds"]), milliseconds(plain["backward_seconds"])
    return Fold(
        f"On the {device(result)} the layer's matmuls alone take {modes['22B']['matmul_share']:.0%} of its time",
        "That is a layer with sequence parallelism that recomputes nothing. Without sequence parallelism it takes "
        f"{forward} ms forward and {backward} ms backward; with sequence parallelism, {1 + sequence:.0%} of that. "
        f"Large matmuls run at {matmuls:.1f} times an A100's peak rate, copies at {memory:.1f} times its bandwidth.",
        prose=True,
    )


def strangers_bars(result: Result) -> Drawing:
    """Draw predicted and measured peaks of models that others wrote.

    Predicted is the peak of a step on fake tensors plus cuBLAS's workspaces; measured is the peak of the bytes that the
    GPU's allocator gave out.

    Args:
        result: A results file with the measurement "strangers".
    """
    rows = {
        f"{_STRANGERS.get(row['name'].partition(' ')[0], row['name'])}, {row['sizes'].replace(',', ', ')}": row
        for row in result["strangers"]
        if "peak_bytes" in row.get("record_fake", {})
    }
    seen = {name: row["peak_bytes"] for name, row in rows.items()}
    predicted = {name: row["record_fake"]["peak_bytes"] + row["cublas_bytes"] for name, row in rows.items()}
    apart = {name: abs(predicted[name] - seen[name]) for name in rows}
    return bar_chart(
        f"Predicted with fake tensors, measured on the {device(result)}:<br>at most {max(apart.values()):,} B apart",
        {"fake tensors + cuBLAS's workspaces": predicted, "measured": seen},
        "peak of one training step",
        beside=True,
        fills=_SIDES,
        about={name: f"{size:,} B apart" for name, size in apart.items()},
    )
