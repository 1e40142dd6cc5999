"""What the library's commands share: options, results as text or JSON, and bad input as one line with exit code 2."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from actmem.config import ConfigError

if TYPE_CHECKING:  # only what prints tables needs rich
    from rich.console import Console
    from rich.table import Table


def whole_number(text: str) -> int:
    """An integer in ASCII digits: Python also takes 1_0 and other scripts' digits.  Raises ValueError."""
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(text)
    return int(text)


class Parser(argparse.ArgumentParser):
    """The options of ``actmem WORD``, and what runs it."""

    def __init__(self, word: str, description: str, **options):
        super().__init__(prog=f"actmem {word}", description=description, **options)
        self.register("type", int, whole_number)
        self.word = word

    def error(self, message: str) -> NoReturn:
        raise _BadOption(message)

    def add_json(self, what: str) -> None:
        """The option ``--json [FILE]``; see ``write``."""
        to = f"{what} as JSON, to FILE; without FILE, to the screen"
        self.add_argument("--json", nargs="?", const="-", metavar="FILE", type=writable, help=to)

    def run(self, argv: Sequence[str] | None, command: Callable[[argparse.Namespace], int]) -> int:
        """The command's exit code; after one line 2 on a bad option, a ConfigError or a file that can't be opened, and
        130 on Ctrl-C."""
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
        print(f"actmem {self.word}: {' '.join(message.split())}", file=sys.stderr)
        return code


def one_line(error: BaseException) -> str:
    """An exception as one line of at most 200 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 200 else f"{text[:199]}…"


def show_progress(text: str) -> None:
    """Say on one line of standard error how far the work is, in place of what was said before; only on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:79]}", end="", file=sys.stderr, flush=True)


class _BadOption(Exception):
    """What argparse says of options that it can't read."""


def writable(where: str) -> str:
    """The name of a file as it is, refused before any work is done if nothing can be written there."""
    path = Path(where)
    if where != "-" and (path.is_dir() or not path.parent.is_dir()):
        raise argparse.ArgumentTypeError(f"cannot write {where}: {'it is' if path.is_dir() else 'not in'} a directory")
    return where


def write(where: str, text: str) -> None:
    """Write ``text`` to a file, or to the screen if ``where`` is "-".  Raises ConfigError if it can't."""
    if where == "-":
        sys.stdout.write(text)
        return
    try:
        Path(where).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {where}", error.strerror or "") from error


def screen(**options: Any) -> Console:
    """A console for tables of 80 columns: on a narrower screen the terminal wraps lines, and no digit is lost.

    Args:
        options: of rich's Console.
    """
    from rich.console import Console

    console = Console(**options)
    console.width = max(80, console.width)
    return console


def empty_table(title: str, *columns: str) -> Table:
    """An empty table for people: names to the left, numbers to the right; plans and sources wrap."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1)
    )
    for name in columns:
        justify: Literal["left", "right"] = "left" if name in ("plan", "line", "source") else "right"
        made.add_column(name, justify=justify, no_wrap=name not in ("plan", "source"))
    return made
