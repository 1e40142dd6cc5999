"""``python -m actmem WORD …``: the library's commands, each loaded when it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable


def _plan() -> Callable[[list[str]], int]:
    from actmem.plan.plan_command import main as run

    def verify(console, model, plan):  # only this needs torch
        from actmem.verify import report_verification

        return report_verification(console, model, plan)

    def run_any(argv: list[str]) -> int:
        of_others = any(word.partition("=")[0] == "--framework" for word in argv)
        if of_others or any(":" in word or word.endswith(".json") for word in argv[:1]):
            from actmem.plan.own_model import main as run_own
            from actmem.tape.model_tape import solved_target
            from actmem.tape.tape_command import parsed_sizes

            return run_own(argv, parsed_sizes, solved_target)
        return run(argv, verify)

    return run_any


def _record() -> Callable[[list[str]], int]:
    from actmem.measure.record_command import main as run

    return run


def _diff() -> Callable[[list[str]], int]:
    from actmem.measure.diagnosis import main as run

    return run


def _tape() -> Callable[[list[str]], int]:
    from actmem.tape.tape_command import main as run

    return run


#: Word → what loads its ``main(argv) -> exit code``.
COMMANDS = {"plan": _plan, "record": _record, "diff": _diff, "tape": _tape}


def main(argv: list[str]) -> int:
    """Run one command; exit code 2, with one line, on an unknown word."""
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]]()(argv[1:])
    print(f"usage: python -m actmem {{{','.join(COMMANDS)}}} …; each has --help", file=sys.stderr)
    return 0 if argv[:1] in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
