"""python labs/measure_paper.py

Every number of tables 2 to 5 and figures 1, 7 and 9 of 2205.05198 beside ours: by formula, and measured.
Memory is counted on emulated ranks of the real GPT, with all layers of a stage and every microbatch in
flight; FLOPs by torch on the whole model.  No GPU and no torchrun needed.
Exit code 0 if every measured number equals its formula, 1 if any does not, 2 on wrong use.
"""

import os
import sys
import time

from actmem.config import PAPER_MODELS, check_size
from actmem_course.bench.measure_paper import SECTIONS, measure_paper, parts_of
from actmem_course.bench.runner import Measurement
from actmem_course.process import lab

PROCESSES = "measure the models in up to N processes, each of about 0.4 GiB (default: %(default)s)"


@lab
def main() -> int:
    run = Measurement(__doc__)
    run.several("model", tuple(PAPER_MODELS))
    run.several("section", tuple(SECTIONS))
    run.option("--processes", type=int, metavar="N", default=min(3, os.cpu_count() or 1), help=PROCESSES)
    with run.asked() as args:
        run.alone()
        check_size("processes", args.processes, largest=64)

    sections, models = run.chosen("section"), run.chosen("model")
    started = time.monotonic()
    with run.status(f"measuring {len(models)} models") as say:
        entries = measure_paper(sections, models, args.processes, lambda name: say(f"measured {name}"))
    seconds = time.monotonic() - started
    for section in sections:
        run.show(*parts_of(section, entries[section]), "", crop=False)  # rather too wide than cut off
    everything = [entry for section in sections for entry in entries[section]]
    run.write(everything)
    measured = [entry for entry in everything if entry.measured is not None]
    wrong = [entry for entry in measured if not entry.exact]
    for entry in wrong:
        off = entry.difference if isinstance(entry.difference, int) else float(entry.difference or 0)
        what = f"{entry.section}, {entry.model}, {entry.quantity}: off by {off:,}"
        run.show(f"{what}\n{entry.disagreement}".rstrip(), markup=False)
    verdict = f"{len(measured) - len(wrong)} of {len(measured)} measured numbers equal their formulas exactly"
    run.show(f"[bold red]{verdict}" if wrong else verdict if measured else "nothing in these sections is measured")
    run.show(f"measured in {seconds:.1f} seconds")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
