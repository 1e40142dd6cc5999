"""Speed tables and figure 8: widths, words, and no overhead that noise could have made."""

import plotly.graph_objects as go
import pytest
from measure_peers import missing_lines, overheads_table, peers_table
from measure_speed import VARIANTS, noise_line, speed_table
from rich.console import Console

from actmem_course.figures.text import overhead_text, speed_facts
from actmem_course.lab_figures import overhead_finding, speed_figure


def overhead(value, low, high, is_real, noise):
    margin = (high - low) / 2
    interval = f"{1 + low:.2f}–{1 + high:.2f}"
    return {
        "value": value, "low": low, "high": high, "is_real": is_real, "noise": noise, "ratio": 1 + value,
        "interval": interval, "margin": margin, "within": max(noise, margin),
    }  # fmt: skip


def around(value, margin, is_real, noise=0.03):
    return overhead(value, value - margin, value + margin, is_real, noise)


def line(variant, number):
    return {
        "name": variant.name, "sequence_parallel": variant.sequence_parallel, "recompute": variant.recompute,
        "forward_seconds": 0.1234, "backward_seconds": 0.3,
        "recompute_seconds": 0.05, "combined_seconds": 0.4234, "over": around(0.1 * number, 0.02, number > 1, 0.118) if number else None,
        "noise": 0.118, "flops_overhead": 0.3333, "paper_overhead_percent": 39, "held_bytes": 10**9,
        "peak_bytes": 2 * 10**9, "exact": True,
    }  # fmt: skip


LINES = [line(variant, number) for number, variant in enumerate(VARIANTS)]


def printed(table):
    console = Console(width=80, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_eighty_columns_cut_nothing_off():
    text = printed(speed_table(LINES, "title"))
    assert "…" not in text and all(len(row.rstrip()) <= 80 for row in text.splitlines())
    assert "953.7 MiB" not in text and "holds 954 MiB" in text and "peak 1.86 GiB" in text
    assert "paper +39%" in text and "FLOPs +33.3%" in text


def test_noise_is_never_printed_as_an_overhead():
    text = printed(speed_table(LINES, ""))
    assert "+10.0%" not in text and "within ±12%" in text and "+20.0% ±2.0" in text
    assert overhead_text(overhead(0.01, -0.03, 0.05, False, 0.002)) == "within ±4.0%"
    assert overhead_text(overhead(-0.031, -0.034, -0.028, True, 0.002)) == "-3.1% ±0.3"
    assert "up to 11.8% apart (wall clock)" in noise_line(0.118, 20, "wall clock")
    facts = speed_facts(LINES)
    assert facts["selective"] == "forward 123, backward 300, both 423 ms, overhead +30.0% ±2.0"
    assert facts[VARIANTS[1].name].endswith("overhead within ±12%") and "overhead" not in facts[VARIANTS[0].name]


def test_figure_8_adds_up_to_forward_and_backward():
    drawing = speed_figure(LINES, "on this machine")
    spec = drawing.spec()
    go.Figure(data=spec["data"], layout=spec["layout"])
    bars = [trace for trace in drawing.traces if trace["type"] == "bar"]
    for number, one in enumerate(LINES):
        seconds = one["forward_seconds"] + one["backward_seconds"]
        assert sum(trace["x"][number] for trace in bars) == pytest.approx(1000 * seconds)
    assert drawing.layout["title"]["text"] == "Full recomputation costs +20%, selective with sequence parallelism +40%"
    assert "selective, literal" in drawing.alt and "423 ms, +30.0% ±2.0" in drawing.alt
    assert drawing.layout["title"]["subtitle"]["text"] == "on this machine"


def test_the_title_does_not_name_noise_either():
    quiet = [{**one, "over": around(0.3, 0.02, False, 0.0204)} for one in LINES]
    less = "costs less than 3%, selective with sequence parallelism less than 3%"
    assert overhead_finding(quiet) == f"Full recomputation {less}"


def peer(mode, name, **more):
    times = {"forward_seconds": 0.05, "backward_seconds": 0.1, "combined_seconds": 0.123}
    compared = dict.fromkeys(("ours", "over"))
    counts = {"sequences": 1, "held_bytes": 10**6, "peak_bytes": 10**9}
    return {"mode": mode, "name": name, "unavailable": "", **times, **compared, **counts, **more}


PEER_LINES = [
    peer("selective", "ours"),
    peer("selective", "PlainTP", ours=around(-0.385, 0.015, True), held_bytes=1_500_000),
    peer("selective", "DTensor", ours=overhead(-0.01, -0.1, 0.1, False, 0.03)),
    peer("selective", "Another", unavailable="not here"),
    peer("none", "Another", unavailable="not here"),
]


def test_peers_table():
    text = printed(peers_table(PEER_LINES, "selective"))
    assert "…" not in text and "Another" not in text
    assert "0.61" in text and "0.60–0.63" in text and "× 1.50" in text
    assert "0.99" not in text and "within 0.10" in text
    assert missing_lines(PEER_LINES) == ["Another did not run (selective, none): not here"]


def test_overheads_over_the_same_layer():
    lines = [
        {**PEER_LINES[0], "over": around(0.04, 0.01, True)},
        {**PEER_LINES[1], "over": around(0.02, 0.01, False)},
        {**PEER_LINES[0], "mode": "full", "over": around(0.25, 0.01, True)},
    ]
    rows = [row.split() for row in printed(overheads_table(lines)).splitlines()]
    assert ["ours", "+4.0%", "±1.0", "+25.0%", "±1.0"] in rows
    assert ["PlainTP", "within", "±3.0%"] in rows
