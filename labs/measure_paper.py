"""python labs/measure_paper.py

Every number of tables 2 to 5 and figures 1, 7 and 9 of 2205.05198 beside ours: by formula, and measured.
Memory is counted on emulated ranks of the real GPT, with all layers of a stage and every microbatch in
flight; FLOPs by torch on the whole model.  No GPU and no torchrun needed.
Exit code 0 if every measured number equals its formula, 1 if any does not, 2 on wrong use.
"""

import json
import os
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from actmem.config import ConfigError, check_size
from actmem.models import PAPER_MODELS
from actmem_course.arguments import LabParser, add_json_argument
from actmem_course.bench.measure_paper import SECTIONS, jobs_of, measure_paper, parts_of
from actmem_course.files import check_files, write_text
from actmem_course.process import lab, lab_console


@lab
def main() -> int:
    parser = LabParser(prog="measure_paper.py", description=__doc__.split("\n\n")[1])
    parser.add_argument(
        "--model",
        action="append",
        choices=tuple(PAPER_MODELS),
        metavar="NAME",
        help=f"one of {', '.join(PAPER_MODELS)}; may be repeated (default: all)",
    )
    parser.add_argument(
        "--section",
        action="append",
        choices=tuple(SECTIONS),
        metavar="NAME",
        help=f"one of {', '.join(SECTIONS)}; may be repeated (default: all)",
    )
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        default=min(3, os.cpu_count() or 1),
        help="measure in up to N processes, each of about 0.4 GiB (default: %(default)s)",
    )
    add_json_argument(parser)
    args = parser.parse_args()
    with parser.refusing():
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise ConfigError("started by torchrun", f"needs a single process: python labs/{parser.prog}")
        check_size("processes", args.processes, largest=64)
        check_files(args, "json")

    models = [name for name in PAPER_MODELS if name in (args.model or PAPER_MODELS)]
    sections = [name for name in SECTIONS if name in (args.section or SECTIONS)]
    entries, usage = _measure(sections, models, args.processes)
    console = lab_console()
    for section in sections:
        for part in parts_of(section, entries[section]):
            console.print(part, highlight=False, crop=False)  # rather too wide than cut off
        console.print()
    everything = [entry for section in sections for entry in entries[section]]
    if args.json:
        text = json.dumps([entry.as_json() for entry in everything], ensure_ascii=False, indent=1)
        write_text(args.json, text + "\n")
    return _verdict(console, everything, usage)


def _measure(sections, models, processes):
    screen = Console(stderr=True)
    columns = (
        TextColumn("measuring"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("", total=len(jobs_of(sections, models)))
        return measure_paper(
            sections, models, processes, lambda job: progress.update(task, advance=1, description=job.label)
        )


def _verdict(console, entries, usage) -> int:
    measured = [entry for entry in entries if entry.measured is not None]
    wrong = [entry for entry in measured if not entry.exact]
    for entry in wrong:
        off = entry.difference if isinstance(entry.difference, int) else float(entry.difference)
        what = f"{entry.section}, {entry.model}, {entry.quantity}: off by {off:,}"
        console.print(f"{what}\n{entry.disagreement}".rstrip(), highlight=False, markup=False)
    verdict = f"{len(measured) - len(wrong)} of {len(measured)} measured numbers equal their formulas exactly"
    if not measured:
        verdict = "nothing in these sections is measured"
    console.print(f"[bold red]{verdict}" if wrong else verdict, highlight=False)
    memory = f", at most {usage.peak_bytes / 2**30:.2f} GiB of memory" if usage.peak_bytes else ""
    plural = "es" if usage.processes > 1 else ""
    console.print(
        f"measured in {usage.seconds:.1f} seconds by {usage.processes} process{plural}{memory}", highlight=False
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
