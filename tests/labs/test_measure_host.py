"""measure_host: every lab in turn on one host, one JSON file, one page; what a lab's failure does; overlap from a trace."""

import json
import sys

import measure_host
import pytest

from actmem_course.lab_tools.trace import hidden_collectives
from actmem_course.launch import run


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_lab_in_turn(ranks, tmp_path):
    paths = tmp_path / "host.json", tmp_path / "host.html"
    done = run(
        "measure_host.py", "--ranks", ranks, "--device", "cpu", "--quick", "--json", paths[0], "--html", paths[1]
    )
    ran = 5 if ranks == 1 else 6
    assert done.returncode == 0 and f"{ran} of 6 labs agree with their formulas." in done.stdout, done.stdout
    results = json.loads(paths[0].read_text())
    titles = [step.title for step in measure_host.steps(ranks)]
    assert list(results["labs"]) == titles and len(titles) == 6
    skipped = [title for title, found in results["labs"].items() if "skipped" in found]
    assert skipped == (["Pipeline of 2 stages"] if ranks == 1 else [])
    assert all(found["rows"] for title, found in results["labs"].items() if title not in skipped)
    page = paths[1].read_text()
    assert all(f"<h2>{title}</h2>" in page for title in titles)
    assert page.count("Plotly.newPlot(") == (0 if ranks == 1 else 1)


def test_a_lab_that_fails_does_not_end_the_others(monkeypatch, tmp_path, capsys):
    (tmp_path / "wrong.py").write_text("import sys; print('no'); sys.exit(3)")
    (tmp_path / "right.py").write_text(
        "import sys, pathlib; pathlib.Path(sys.argv[-3]).write_text('[1]'); print(f'yes\\n{sys.argv[-3]}')"
    )
    monkeypatch.setattr(measure_host, "LABS", tmp_path)
    monkeypatch.setattr(
        measure_host, "steps", lambda ranks: [measure_host.Step(name, f"{name}.py") for name in ("wrong", "right")]
    )
    path = tmp_path / "host.json"
    monkeypatch.setattr(sys, "argv", ["measure_host.py", "--ranks", "1", "--json", str(path)])
    assert measure_host.main() == 1
    labs = json.loads(path.read_text())["labs"]
    assert [(one["exit_code"], one["printed"], one["rows"]) for one in labs.values()] == [
        (3, "no", []),
        (0, "yes", [1]),
    ]
    assert capsys.readouterr().out.rstrip().endswith("not as predicted, or failed: wrong")


def kernel(name, start, duration):
    return {"cat": "kernel", "name": name, "ts": start, "dur": duration}


def test_what_runs_beside_a_collective_is_counted_once():
    spans = [("SP", 0, 10_000), ("forward", 0, 4_000), ("backward", 4_000, 6_000)]
    events = [{"cat": "gpu_user_annotation", "name": name, "ts": start, "dur": length} for name, start, length in spans]
    events += [
        kernel("ncclDevKernel_AllGather_RING_LL", 100, 1_000),  # nothing beside it
        kernel("gemm", 2_000, 1_000),
        kernel("ncclDevKernel_AllGather_RING_LL", 5_000, 2_000),  # two matmuls, which overlap each other
        kernel("gemm", 4_500, 1_500),
        kernel("gemm", 5_500, 1_000),
        kernel("ncclDevKernel_ReduceScatter_Sum", 9_000, 500),
    ]
    found = [(row["step"], row["pass"], row["kind"], row["ms"], row["hidden_ms"]) for row in hidden_collectives(events)]
    assert found == [
        ("SP", "forward", "all-gather", 1.0, 0.0),
        ("SP", "backward", "all-gather", 2.0, 1.5),
        ("SP", "backward", "reduce-scatter", 0.5, 0.0),
    ]
    assert hidden_collectives([{"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1}]) == []
