"""``python -m actmem_course.judge progress`` shows what you have passed over all labs, and what is next."""

from __future__ import annotations

import sys

from rich.text import Text

from actmem_course.arguments import LabParser
from actmem_course.console import lab_console
from actmem_course.judge.learner_progress import LearnerProgress, reading


def main() -> int:
    """Show the progress, or reset it.  Exit code 0, or 2 on wrong use."""
    parser = LabParser(prog="actmem_course.judge", description=__doc__)
    parser.add_argument("what", choices=["progress"])
    parser.add_argument("--reset", action="store_true", help="forget what has passed and which hints were given")
    args = parser.parse_args()
    progress = LearnerProgress()
    if args.reset:
        with parser.refusing():
            progress.reset()
    console = lab_console(highlight=False, emoji=False)
    console.print(progress.table())
    console.print(Text(progress.summary()), soft_wrap=True)
    if found := progress.next():
        lab, exercise = found
        console.print(
            Text(f"next: {exercise.number} in my/labs/{lab.name}.py; read {reading(lab, exercise)}"), soft_wrap=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
