"""python labs/measure_paper.py

Every number of tables 2 to 5 and figures 1, 7 and 9 of 2205.05198 beside ours: by formula, and measured.
Memory is counted on emulated ranks of the real GPT, with all layers of a stage and every microbatch in
flight; FLOPs by torch on the whole model.  No GPU and no torchrun needed.
Exit code 0 if every measured number equals its formula, 1 if any does not, 2 on wrong use.
"""

import os
import sys
from collections.abc import Callable, Sequence

from paper_steps import sections
from paper_steps.sections import PaperEntry
from paper_steps.tables import parts_of

from actmem.config import PAPER_MODELS, ConfigError
from actmem_course.files import check_files
from actmem_course.lab_tools.options import lab_parser
from actmem_course.lab_tools.output import WRONG, screen_of, status, write_rows
from actmem_course.process import lab

#: In the order of the paper.
SECTIONS: dict[str, Callable[[str], list[PaperEntry]]] = {
    "figure1": sections.figure1,
    "table2": sections.table2,
    "table3": sections.table3,
    "figure7": sections.figure7,
    "table4": sections.table4,
    "table5": sections.table5,
    "flops": sections.flops,
    "figure9": sections.figure9,
    "disagreements": sections.disagreement_entries,
}


@lab
def main() -> int:
    parser = lab_parser("measure_paper.py", __doc__ or "")
    for name, choices in (("model", PAPER_MODELS), ("section", SECTIONS)):
        meaning = f"one of {', '.join(choices)}; may be repeated (default: all)"
        parser.add_argument(f"--{name}", action="append", choices=tuple(choices), metavar="NAME", help=meaning)
    args = parser.parse_args()
    with parser.refusing():
        check_files(args, "json")
        if "RANK" in os.environ:
            raise ConfigError("started by torchrun", "needs a single process: python labs/measure_paper.py")

    screen = screen_of(0)
    names = [name for name in SECTIONS if name in (args.section or SECTIONS)]
    models = [name for name in PAPER_MODELS if name in (args.model or PAPER_MODELS)]
    with status(0, f"measuring {len(models)} models"):
        found = measure_paper(names, models)
    for name in names:
        for part in [*parts_of(name, found[name]), ""]:
            screen.print(part, crop=False)  # rather too wide than cut off
    entries = [entry for name in names for entry in found[name]]
    write_rows(args.json, 0, [entry.as_row() for entry in entries])
    measured = [entry for entry in entries if entry.measured is not None]
    wrong = [entry for entry in measured if not entry.exact]
    for entry in wrong:
        off = entry.difference if isinstance(entry.difference, int) else float(entry.difference or 0)
        what = f"{entry.section}, {entry.model}, {entry.quantity}: off by {off:,}"
        screen.print(f"{what}\n{entry.disagreement}".rstrip(), markup=False)
    if measured:
        agree = f"{len(measured) - len(wrong)} of {len(measured)} measured numbers equal their formulas exactly"
        screen.print(agree, style=WRONG if wrong else None)
    else:
        screen.print("nothing in these sections is measured")
    return 1 if wrong else 0


def measure_paper(names: Sequence[str], models: Sequence[str]) -> dict[str, list[PaperEntry]]:
    """Compare the paper's numbers with ours, section by section; all ranks are emulated in this process.

    Args:
        names: names of the sections, keys of SECTIONS such as "table2".
        models: names of the paper's models, such as "175B".

    Returns: the entries of each section, by the section's name. A measurement that several sections of one model need
        runs once.
    """
    found: dict[str, list[PaperEntry]] = {name: [] for name in names}
    for model in (*models, ""):
        for name in names:
            if model in models_of(name, models):
                found[name] += SECTIONS[name](model)
    return found


def models_of(section: str, models: Sequence[str]) -> Sequence[str]:
    """Return the names of the models for which a section is printed; [""] for a section about no single model.

    Args:
        section: the section's name, such as "table4".
        models: the names of the models that the user asks for.
    """
    if section == "disagreements":
        return [""]
    if section == "table4":
        return [name for name in models if name == "22B"]
    if section == "figure9":  # pipeline ranks: of the 530B model, or of those asked for that have any
        piped = [name for name in models if PAPER_MODELS[name].parallel.pipeline_parallel_size > 1]
        return ["530B"] if "530B" in piped else piped
    return models


if __name__ == "__main__":
    sys.exit(main())
