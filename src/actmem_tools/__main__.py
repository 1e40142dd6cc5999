"""``actmem WORD …``: the library's commands.  A command's module is imported only when that command is run."""

import sys
from importlib import import_module

#: The commands, each with the module of this package that runs it.
COMMANDS = {"plan": "plan.plan_command", "record": "record_command", "diff": "diagnosis", "tape": "tape.tape_command"}


def _solved(*request):
    """Solve the tapes of a model in the user's own code for ``actmem plan``, which imports torch only for this."""
    from actmem_tools.tape.model_tape import solved_target

    return solved_target(*request)


def _verify(*plan):
    """Run ``plan --verify``, which needs torch too."""
    from actmem_tools.verify import report_verification

    return report_verification(*plan)


def main(argv: list[str] | None = None) -> int:
    """Run the command that the first argument names.

    Args:
        argv: the command's name and its options, such as ``["plan", "175B", …]``; None: the process's own command line.

    Returns: the command's exit code; 2, after one line on standard error, if there is no such command; 130 after
        Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        try:
            run = import_module(f"actmem_tools.{COMMANDS[argv[0]]}").main
            return run(argv[1:], _solved, _verify) if argv[0] == "plan" else run(argv[1:])
        except KeyboardInterrupt:  # while torch was being imported
            print(f"actmem {argv[0]}: interrupted", file=sys.stderr)
            return 130
    print(f"usage: actmem {{{','.join(COMMANDS)}}} …; each has --help", file=sys.stderr)
    return 0 if argv[:1] in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main())
