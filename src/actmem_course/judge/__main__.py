"""``python -m actmem_course.judge`` shows which exercises of all labs you have passed, and what is next."""

from __future__ import annotations

import sys

from rich.text import Text

from actmem_course.arguments import LabParser
from actmem_course.judge.learner_progress import LearnerProgress, reading
from actmem_tools.command_line import screen


def main() -> int:
    """Show or reset the progress.  Exit code 0, or 2 on wrong use."""
    parser = LabParser(prog="actmem_course.judge", description=__doc__)
    parser.add_argument("--reset", action="store_true", help="forget what has passed and which hints were given")
    args = parser.parse_args()
    progress = LearnerProgress()
    with parser.refusing():
        if args.reset:
            progress.reset()
    console = screen(highlight=False, emoji=False)
    console.print(progress.table())
    console.print(Text(progress.summary()), soft_wrap=True)
    if upcoming := progress.next():
        lab, exercise = upcoming
        console.print(
            Text(f"next: {exercise.number} in my/labs/{lab.name}.py; read {reading(lab, exercise)}"), soft_wrap=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
