"""Is a chapter longer than it may be?  python -m notebooks.source.words

For each chapter: the words of its text, the minutes that it states, and the imports of its first cell, each against its
limit.  Ends with 1 if one is over.
"""

import ast
import re
import sys

import jupytext

from notebooks.source.build import SOURCES

#: At most so many words and minutes.
LIMITS = {
    "01_memory_wall": (1687, 30),
    "02_counting_bytes": (1734, 45),
    "03_tensor_parallelism": (1373, 35),
    "04_sequence_parallelism": (1330, 35),
    "05_recomputation": (1710, 50),
    "06_pipeline": (1394, 40),
    "07_time": (1272, 40),
    "08_todays_layer": (918, 35),
    "09_your_model": (1177, 35),
    "10_the_loss": (884, 35),
    "11_adapters": (918, 35),
    "12_long_sequences": (1311, 35),
    "13_experts": (978, 35),
    "14_allocator_and_eight_bits": (509, 25),
}
MOST_IMPORTS = 6


def measures(name: str) -> list[tuple[str, float, int]]:
    """What is limited in a chapter: its name, how much there is of it, and its limit."""
    cells = jupytext.read(SOURCES / f"{name}.py", fmt="py:percent").cells
    prose = [cell.source for cell in cells if cell.cell_type == "markdown"]
    first_code = next(cell.source for cell in cells if cell.cell_type == "code")
    imports = [node for node in ast.walk(ast.parse(first_code)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    stated = re.search(r"(\d+) minutes", "\n".join(prose))
    most_words, most_minutes = LIMITS[name]
    return [
        ("words", sum(len(text.split()) for text in prose), most_words),
        ("minutes", int(stated[1]) if stated else float("inf"), most_minutes),
        ("imports", len(imports), MOST_IMPORTS),
    ]


def main() -> int:
    found = {name: measures(name) for name in LIMITS if (SOURCES / f"{name}.py").exists()}
    for name, each in found.items():
        marks = (f"{what} {amount} of {limit}{' OVER' if amount > limit else ''}" for what, amount, limit in each)
        print(f"{name:28}", ", ".join(marks))
    wrong = {path.stem for path in SOURCES.glob("[0-9][0-9]_*.py")} ^ set(LIMITS)
    for name in sorted(wrong):
        print(f"{name:28} {'has no limit' if name not in LIMITS else 'is missing'}")
    print(f"words of all chapters: {sum(each[0][1] for each in found.values())}")
    return bool(wrong) or any(amount > limit for each in found.values() for _, amount, limit in each)


if __name__ == "__main__":
    sys.exit(main())
