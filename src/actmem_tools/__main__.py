"""``actmem WORD …``: the library's commands.  A command's module is imported only when that command is run."""

import sys
from collections.abc import Callable

COMMANDS = ("plan", "record", "diff", "tape")


def _plan(argv: list[str]) -> int:
    """Run ``actmem plan``.  torch is imported only by the two parts of it that need it: solving tapes and --verify."""
    from actmem_tools.plan.plan_command import main as run

    def solved(*request):
        from actmem_tools.tape.model_tape import solved_target

        return solved_target(*request)

    def verify(*plan):
        from actmem_tools.verify import report_verification

        return report_verification(*plan)

    return run(argv, solved, verify)


def _command(word: str) -> Callable[[list[str]], int]:
    if word == "record":
        from actmem_tools.record_command import main as run
    elif word == "diff":
        from actmem_tools.diagnosis import main as run
    elif word == "tape":
        from actmem_tools.tape.tape_command import main as run
    else:
        run = _plan
    return run


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first argument names.

    Args:
        argv: the command's name and its options; by default those that the process was started with.

    Returns: the command's exit code; 2, after one line on standard error, if there is no such command; 130 after
        Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        try:
            return _command(argv[0])(argv[1:])
        except KeyboardInterrupt:  # while torch was being imported
            print(f"actmem {argv[0]}: interrupted", file=sys.stderr)
            return 130
    print(f"usage: actmem {{{','.join(COMMANDS)}}} …; each has --help", file=sys.stderr)
    return 0 if argv[:1] in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main())
