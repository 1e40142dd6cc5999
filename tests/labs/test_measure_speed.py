"""Table 4: every row of the paper's, with its bytes exact; times are never judged.  Chapter 7 runs it on two ranks."""

import json

from measure_speed import BASELINE, VARIANTS

from tests.labs.in_process import shown_in_80_columns

SPEED = "measure_speed.py"
TINY = ["--seq-length", 16, "--micro-batch-size", 1, "--hidden-size", 32, "--num-attention-heads", 4, "--rounds", 2]


def test_emulated_with_all_files(tmp_path):
    files = {name: tmp_path / name for name in ("json", "trace")}
    shown = shown_in_80_columns(SPEED, "--emulate", 2, *TINY, *(f"--{name}={path}" for name, path in files.items()))
    assert "collectives send nothing here" in " ".join(shown.split()) and "All 8 layers hold" in shown
    assert "core attention recompute" in files["trace"].read_text()
    lines = json.loads(files["json"].read_text())
    assert [line["name"] for line in lines] == [variant.name for variant in VARIANTS]
    assert lines[0]["name"] == BASELINE and lines[0]["over"] is None
    for line in lines:
        assert line["held_bytes"] == line["predicted_bytes"] > 0 and line["peak_bytes"] > line["held_bytes"]
        assert line["combined_seconds"] > 0
