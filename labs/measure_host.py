"""python labs/measure_host.py    (or: make gpus)

Run five labs on all GPUs of this host, or in --ranks N processes on its CPU: Table 2 on real ranks, parity with one
device, a pipeline of two stages, communication with one hardware queue and with eight, and Table 4 with a trace that
shows how much of the collectives' time the matmuls hide. All results go into one JSON file and one page. If a lab
fails, the others still run.
Two hosts: sbatch labs/slurm.sbatch labs/measure_host.py --html host.html
Exit code 0 if every lab agrees with its formulas, 1 if one does not, 2 on wrong use.
"""

import html
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from gpu_steps.session import machine
from rich.console import Console

from actmem.config import ConfigError, check_size
from actmem_course.files import check_files, write_text
from actmem_course.lab_tools.options import add_file_argument, lab_parser
from actmem_course.lab_tools.trace import hidden_collectives
from actmem_course.launch import LABS
from actmem_course.process import lab
from actmem_tools.command_line import counted

#: Seconds after which a lab is ended; the others still run.
LONGEST = 900
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class Step:
    """One run of a lab's script.

    Attributes:
        title: the heading above what the lab prints.
        script: the lab's file name in labs/.
        arguments: the lab's command-line arguments; --device and others are added.
        needs: the fewest ranks with which the lab runs.
        environment: environment variables to set for the lab, by name.
        is_timed: whether the lab takes --rounds.
        traced: whether the lab writes a profiler's trace, with --trace.
    """

    title: str
    script: str
    arguments: tuple[object, ...] = ()
    needs: int = 1
    environment: dict[str, str] = field(default_factory=dict)
    is_timed: bool = False
    traced: bool = False


def steps(ranks: int) -> list[Step]:
    """Return the labs to run, in order.

    Args:
        ranks: how many ranks there are, by which some arguments are chosen.
    """
    communication = [
        Step(f"Communication, {queues} queues", "measure_communication.py", environment={QUEUES: queues}, is_timed=True)
        for queues in ("1", "8")
    ]
    return [
        Step(f"Table 2 on {counted(ranks, 'rank')}", "measure_table2.py"),
        Step("Parity with one device", "measure_parity.py"),
        Step("Pipeline of 2 stages", "measure_pipeline.py", ("--pipeline", 2, "--tensor", max(1, ranks // 2)), needs=2),
        *communication,
        Step("Table 4", "measure_speed.py", is_timed=True, traced=True),
    ]


@lab
def main() -> int:
    parser = lab_parser("measure_host.py", __doc__ or "")
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    usual = "one for each GPU, 2 without"
    parser.add_argument("--ranks", type=int, default=gpus or 2, metavar="N", help=f"ranks (default: {usual})")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quick", action="store_true", help="a tiny layer, and two timed rounds")
    start = "what starts a lab on all ranks, such as 'srun … torchrun …' (default: this host's ranks)"
    parser.add_argument("--start", type=shlex.split, default=[], metavar="COMMAND", help=start)
    add_file_argument(parser, "html", "write one page with all tables and figures (needs plotly)")
    args = parser.parse_args()
    with parser.refusing():
        check_files(args, "json", "html")
        check_size("ranks", args.ranks, largest=64)
        if "RANK" in os.environ:
            raise ConfigError("started by torchrun", "starts its own ranks: python labs/measure_host.py")

    screen = Console()
    results: dict[str, Any] = {"machine": machine(), "ranks": args.ranks, "labs": {}}
    for step in steps(args.ranks):
        screen.rule(step.title, align="left")
        if args.ranks < step.needs:
            found: dict[str, Any] = {"skipped": f"needs {step.needs} ranks, here {args.ranks}"}
        else:
            quick = ("--model", "tiny", *(("--rounds", 2) if step.is_timed else ())) if args.quick else ()
            found = run(step, (*step.arguments, "--device", args.device, *quick), args.ranks, args.start)
        screen.print(found.get("skipped") or found["printed"], markup=False, highlight=False, soft_wrap=True)
        results["labs"][step.title] = found
        if args.json:  # after each, so that nothing is lost
            write_text(args.json, json.dumps(results, indent=1) + "\n")
    if args.html:
        write_text(args.html, page(results))
        screen.print(f"wrote {args.html}")
    failed = [title for title, found in results["labs"].items() if found.get("exit_code")]
    skipped = [title for title, found in results["labs"].items() if "skipped" in found]
    for what, titles in (("not run", skipped), ("not as predicted, or failed", failed)):
        if titles:
            screen.print(f"{what}: {', '.join(titles)}")
    if not failed:
        screen.print(f"{len(results['labs']) - len(skipped)} of {len(results['labs'])} labs agree with their formulas.")
    return 1 if failed else 0


def run(step: Step, arguments: tuple[object, ...], ranks: int, start: list[str]) -> dict[str, Any]:
    """Run a lab on its ranks.

    Args:
        step: the lab, with the environment variables to set.
        arguments: the lab's command-line arguments, without --json and --trace.
        ranks: how many ranks there are.
        start: the command, as a list of words, that starts the ranks; [] starts them on this host.

    Returns: a dict with these keys:
        "script", "arguments", "environment": what ran, and the variables that the step sets.
        "exit_code", "printed": how the lab ended, and its standard output and error.
        "rows": what the lab wrote to --json; [] if it wrote nothing.
        "hidden": only of a traced step: what ``hidden_collectives`` finds in the trace.
    """
    # Ranks on other hosts see the present folder, if it is on a disk that all hosts see.
    with TemporaryDirectory(dir="." if start else None) as folder:
        rows, trace = Path(folder) / "rows.json", Path(folder) / "trace.json"
        call = [str(LABS / step.script), *map(str, arguments), "--json", str(rows)]
        call += ["--trace", str(trace)] if step.traced else []
        command = [*start, *call] if start else [sys.executable, *call, "--ranks", str(ranks)]
        environment = {"OMP_NUM_THREADS": "1", "COLUMNS": "100", **os.environ, **step.environment}
        found: dict[str, Any] = {"script": step.script, "arguments": arguments, "environment": step.environment}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=environment)
            lines = f"{done.stdout}{done.stderr}".rstrip().splitlines()
            # What is said of a file in this folder, which will be gone, isn't passed on.
            printed = "\n".join(line for line in lines if folder not in line)
            found |= {"exit_code": done.returncode, "printed": printed}
        except subprocess.TimeoutExpired:
            found |= {"exit_code": 1, "printed": f"ended after {LONGEST} seconds"}
        found["rows"] = json.loads(rows.read_text()) if rows.exists() else []
        if trace.exists():
            found["hidden"] = hidden_collectives(json.loads(trace.read_text())["traceEvents"])
    return found


def page(results: dict[str, Any]) -> str:
    """Return an HTML page: what each lab printed, the overlap in the trace, and a figure of the pipeline's memory.

    Args:
        results: the object that --json writes: "machine", "ranks", and "labs" with the dicts from ``run`` by title.
    """
    device = results["machine"]["device"]
    parts = [f"<h1>{results['ranks']} ranks on {html.escape(device)}, torch {results['machine']['torch']}</h1>"]
    for title, found in results["labs"].items():
        parts.append(f"<h2>{html.escape(title)}</h2>")
        parts.append(f"<pre>{html.escape(found.get('skipped') or found['printed'])}</pre>")
        parts.extend(f"<p>{html.escape(line)}</p>" for line in hidden_lines(found.get("hidden") or []))
        if found.get("rows") and found["script"] == "measure_pipeline.py":
            parts.append(memory_figure(found["rows"]))
    style = "body{font:16px sans-serif;max-width:60rem;margin:auto;padding:1rem}pre{overflow:auto;font-size:13px}"
    return f"<!doctype html><meta charset=utf-8><title>actmem</title><style>{style}</style>\n" + "\n".join(parts) + "\n"


def hidden_lines(hidden: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each kind of collective in each pass: its time, and how much of that time is hidden.

    Args:
        hidden: the dicts from ``hidden_collectives``.
    """
    for row in hidden:
        yield (
            f"{row['step']}, {row['pass']}: {row['kind']} kernels take {row['ms']:.2f} ms, "
            f"of which {row['hidden_ms']:.2f} ms beside other kernels."
        )


def memory_figure(rows: list[dict[str, Any]]) -> str:
    """Return a figure of the memory of each stage's first rank over the step, as HTML that needs no network.

    Args:
        rows: the dicts that ``labs/measure_pipeline.py`` writes to --json, one for each rank.
    """
    import plotly.graph_objects as go  # loaded only to draw

    from actmem.formulas.schedule import one_forward_one_backward
    from actmem_course.figures.ch06_pipeline import measured_schedule

    stages = max(row["pipeline_rank"] for row in rows) + 1
    firsts = [next(row for row in rows if row["pipeline_rank"] == stage) for stage in range(stages)]
    spec = measured_schedule(one_forward_one_backward(stages, 2 * stages), firsts).spec()
    figure = go.Figure({"data": spec["data"], "layout": spec["layout"]})
    return figure.to_html(full_html=False, include_plotlyjs=True, config=spec["config"])


if __name__ == "__main__":
    sys.exit(main())
