"""Helpers that all ``actmem`` commands use: read options, write results as text or JSON, report errors.

On bad input a command prints one line and exits with code 2.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from actmem.config import ConfigError

if TYPE_CHECKING:  # only what prints tables needs rich
    from rich.console import Console
    from rich.table import Table


class Parser(argparse.ArgumentParser):
    """The command line of ``actmem WORD``: it reads the options, runs the command, and reports errors in one line.

    Args:
        word: the command's name, such as "plan".
        description: one sentence that says what the command does, for ``--help``.
        options: further keyword arguments of ``argparse.ArgumentParser``, such as ``epilog``.
    """

    def __init__(self, word: str, description: str, **options):
        super().__init__(prog=f"actmem {word}", description=description, **options)

    def error(self, message: str) -> NoReturn:
        raise _BadOption(message)

    def add_json(self, what: str) -> None:
        """Add the option ``--json [FILE]``.  Its value is the file's name, or "-" (the screen) if FILE is left out.

        Args:
            what: the object that is written, as a phrase for the help text, such as "the result".
        """
        to = f"{what} as JSON, to FILE; without FILE, to the screen"
        self.add_argument("--json", nargs="?", const="-", metavar="FILE", type=writable, help=to)

    def run(self, argv: Sequence[str] | None, command: Callable[[argparse.Namespace], int]) -> int:
        """Read the options and run the command.

        Args:
            argv: the options as typed; None to read the process's own command line.
            command: a function that gets the options that were read, does the work, and returns an exit code.

        Returns: the command's exit code; 2, after one line on standard error, if an option is bad, if the command
            raises ConfigError or if a file can't be opened; 130 after Ctrl-C; 1 if the pipe that reads the output was
            closed.
        """
        code = 2
        try:
            code = command(self.parse_args(argv))
            sys.stdout.flush()
            return code
        except (ConfigError, _BadOption) as error:
            message = str(error)
        except BrokenPipeError:
            return 1
        except KeyboardInterrupt:
            code, message = 130, "interrupted"
        except OSError as error:
            message = f"cannot use {error.filename or 'standard output'}: {error.strerror}"
        print(f"{self.prog}: {' '.join(message.split())}", file=sys.stderr)
        return code


def one_line(error: BaseException) -> str:
    """Return an exception's type and message as one line of at most 200 characters, such as "ValueError: too long"."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:199]}…"


def show_progress(text: str) -> None:
    """Show a progress message on one line of standard error, which the next call overwrites.

    Nothing is shown if standard error is not a terminal.

    Args:
        text: the message, cut off after 79 characters; "" clears the line.
    """
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:79]}", end="", file=sys.stderr, flush=True)


class _BadOption(Exception):
    """argparse can't read an option; the message is argparse's own."""


def writable(where: str) -> str:
    """Check that an output file can be written; used as an option's ``type=``, so it runs before any work is done.

    Args:
        where: the file's path, or "-" for the screen.

    Returns: ``where``, unchanged.

    Raises: argparse.ArgumentTypeError if the path is a directory, or lies in a directory that doesn't exist.
    """
    path = Path(where)
    if where != "-" and (path.is_dir() or not path.parent.is_dir()):
        raise argparse.ArgumentTypeError(f"cannot write {where}: {'it is' if path.is_dir() else 'not in'} a directory")
    return where


def write(where: str, text: str) -> None:
    """Write ``text`` to the file ``where``, or to standard output if ``where`` is "-".

    Raises: ConfigError if the file can't be written.
    """
    if where == "-":
        sys.stdout.write(text)
        return
    try:
        Path(where).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {where}", error.strerror or "") from error


def screen(**options: Any) -> Console:
    """Make a rich console that is at least 80 columns wide, as wide as the commands' tables.

    A narrower terminal then wraps the lines; with the terminal's own width rich would cut digits off.

    Args:
        options: keyword arguments of ``rich.console.Console``.
    """
    from rich.console import Console

    console = Console(**options)
    console.width = max(80, console.width)
    return console


def empty_table(title: str, *columns: str) -> Table:
    """Make a rich table without rows.

    Args:
        title: the line above the table.
        columns: the headings.  Columns called "plan", "line" and "source" hold text and are aligned left; all other
            columns hold numbers and are aligned right.  Only text under "plan" and "source" may wrap.
    """
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )
    for name in columns:
        justify: Literal["left", "right"] = "left" if name in ("plan", "line", "source") else "right"
        table.add_column(name, justify=justify, no_wrap=name not in ("plan", "source"))
    return table


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural if it isn't 1: ``1 rank``, ``2 ranks``, ``2 microbatches``.

    Args:
        number: the number.
        noun: the noun in the singular, such as "rank".
    """
    return f"{number} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")
