"""Table 4 for notebooks: what this machine measured, what GPUs measured whose results are on file, and what the paper printed.

Takes the lines of a speed measurement as they stand in JSON, with the fields of lab.speed.Line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from actmem.show.speed_table import milliseconds, overhead_text
from actmem.show.text import text_table


def speed_text(lines: Iterable[dict], title: str) -> str:
    """A line for each variant: times, overhead or how large the noise was, the paper's overhead, and bytes held against the formula."""
    body = [
        (
            line["name"], *(milliseconds(line[f"{part}_seconds"]) for part in ("forward", "backward", "combined")), _overhead(line),
            _printed(line), f"{100 * line['flops_overhead']:+.1f}%", line["held_bytes"], line["held_bytes"] - line["predicted_bytes"],
        )
        for line in lines
    ]  # fmt: skip
    header = (title, "forward ms", "backward ms", "both ms", "overhead", "paper", "FLOPs", "bytes held", "− formula")
    return text_table(header, body, " rrrrrrrr")


def speed_facts(lines: Iterable[dict]) -> dict[str, str]:
    """The times alone, by variant: what differs from machine to machine."""
    return {
        line["name"]: f"{milliseconds(line['forward_seconds'])} + {milliseconds(line['backward_seconds'])} = {milliseconds(line['combined_seconds'])} ms, "
        f"overhead {_overhead(line)} (paper {_printed(line)})"
        for line in lines
    }


def results_text(results: Sequence[dict]) -> str:
    """Every speed measurement in files that labs/measure_gpu.py wrote, a table for each layer."""
    parts = []
    for result in results:
        machine, size = result["machine"], result["settings"]["tensor_parallel_size"]
        for case in (case for case in result["cases"] if case["speed"]):
            where = f"{machine['device']}, {result['date'][:10]}: one of {size} emulated ranks"
            parts.append(f"{where}\n" + speed_text(case["speed"], f"{case['model']}, s = {case['seq_length']:,}, b = {case['micro_batch_size']}"))
    return "\n\n".join(parts) or "none yet: python labs/measure_gpu.py writes one, on a machine with a GPU"


def _overhead(line: dict) -> str:
    if line["overhead"] is None:
        return "–"
    return overhead_text(*(line[name] for name in ("overhead", "overhead_low", "overhead_high", "is_real", "noise")))


def _printed(line: dict) -> str:
    return "–" if line["paper_overhead_percent"] is None else f"{line['paper_overhead_percent']:+}%"
