"""Table 4 for notebooks: what this machine measured, what GPUs measured whose results are on file, and what the paper printed.

Takes the lines of a speed measurement as labs write them with --json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from actmem_course.results import SpeedLine, read
from actmem_course.show.speed_table import milliseconds, overhead_text
from actmem_course.show.text import text_table


def speed_text(lines: Iterable[Mapping], title: str) -> str:
    """A line for each variant: times, overhead or how large the noise was, the paper's overhead, and bytes held against the formula."""
    body = [
        (line.name, *_times(line), overhead_text(line.over), _printed(line), f"{100 * line.flops_overhead:+.1f}%", line.held_bytes, line.held_bytes - line.predicted_bytes)
        for line in _typed(lines)
    ]  # fmt: skip
    header = (title, "forward ms", "backward ms", "both ms", "overhead", "paper", "FLOPs", "bytes held", "− formula")
    return text_table(header, body, " rrrrrrrr")


def speed_facts(lines: Iterable[Mapping]) -> dict[str, str]:
    """What differs from machine to machine: each variant's times, and one sentence on the overheads.

    The three times are medians of their own, so they do not add up.  An overhead within noise is not named.
    """
    typed = _typed(lines)
    facts = {line.name: _times_in_words(line) for line in typed}
    compared = [line.over for line in typed if line.over]
    real = sum(over.is_real for over in compared)
    apart = 100 * max((line.noise for line in typed), default=0.0)
    count = f"{real} of {len(compared)} stand" if real else "none stands"
    facts["overheads"] = f"{count} out from noise (the baseline against itself: up to {apart:.1f}% apart)"
    return facts


def _times_in_words(line: SpeedLine) -> str:
    forward, backward, both = _times(line)
    overhead = (
        f", overhead {overhead_text(line.over)} (paper {_printed(line)})" if line.over and line.over.is_real else ""
    )
    return f"forward {forward}, backward {backward}, both {both} ms{overhead}"


def results_text(results: Sequence[Mapping]) -> str:
    """Every speed measurement in files that labs/measure_gpu.py wrote, a table for each layer."""
    parts = []
    for result in results:
        machine, size = result["machine"], result["settings"]["tensor_parallel_size"]
        for case in (case for case in result["cases"] if case["speed"]):
            where = f"{machine['device']}, {result['date'][:10]}: one of {size} emulated ranks"
            title = f"{case['model']}, s = {case['seq_length']:,}, b = {case['micro_batch_size']}"
            parts.append(f"{where}\n{speed_text(case['speed'], title)}")
    return "\n\n".join(parts) or "none yet: python labs/measure_gpu.py writes one, on a machine with a GPU"


def _typed(lines: Iterable[Mapping]) -> list[SpeedLine]:
    return [read(SpeedLine, line) for line in lines]


def _times(line: SpeedLine) -> tuple[str, str, str]:
    seconds = (line.forward_seconds, line.backward_seconds, line.combined_seconds)
    forward, backward, both = map(milliseconds, seconds)
    return forward, backward, both


def _printed(line: SpeedLine) -> str:
    return "–" if line.paper_overhead_percent is None else f"{line.paper_overhead_percent:+}%"
