"""Speed tables and figure 8: widths, words, and no overhead that noise could have made."""

from measure_speed import VARIANTS, speed_table
from rich.console import Console

from actmem_course.figures.text import overhead_text, speed_facts


def overhead(value, margin, is_real):
    low, high = value - margin, value + margin
    return {"value": value, "low": low, "high": high, "is_real": is_real, "margin": margin, "within": max(-low, high)}


def line(variant, number):
    return {
        "name": variant.name, "sequence_parallel": variant.sequence_parallel, "recompute": variant.recompute,
        "forward_seconds": 0.1234, "backward_seconds": 0.3,
        "combined_seconds": 0.4234, "over": overhead(0.1 * number, 0.02, number > 1) if number else None,
        "flops_overhead": 0.3333, "paper_overhead_percent": 39, "held_bytes": 10**9,
        "peak_bytes": 2 * 10**9, "exact": True,
    }  # fmt: skip


LINES = [line(variant, number) for number, variant in enumerate(VARIANTS)]


def printed(table):
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_noise_is_never_printed_as_an_overhead():
    text = printed(speed_table(LINES, ""))
    assert "+10.0%" not in text and "within ±12%" in text and "+20.0% ±2.0" in text
    assert overhead_text(overhead(0.01, 0.04, False)) == "within ±5.0%"
    assert overhead_text(overhead(-0.031, 0.003, True)) == "-3.1% ±0.3"
    facts = speed_facts(LINES)
    assert facts["selective"] == "forward 123, backward 300, both 423 ms, overhead +30.0% ±2.0"
    assert facts[VARIANTS[1].name].endswith("overhead within ±12%") and "overhead" not in facts[VARIANTS[0].name]
