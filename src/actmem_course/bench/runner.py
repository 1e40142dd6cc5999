"""What every lab that measures does alike: options, refusals, ranks, printing, ``--json`` and ``--html``.

A lab reads from top to bottom: its options, what it checks, what it measures, what it shows.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console, RenderableType

from actmem.config import ConfigError
from actmem_course.arguments import ELEMENT_SIZES, LabParser, add_json_argument
from actmem_course.figures.marks import Drawing
from actmem_course.files import check_files, replacing, write_text
from actmem_course.process import lab_console
from actmem_course.ranks import Ranks, ranks
from actmem_course.results import plain


class Measurement:
    """One run of a lab.

    doc: the lab's docstring; its first line says how to start it, its second paragraph what it does.  spelled: options
    that are shorter than the argument that a ConfigError names.  json: whether it has --json.
    """

    def __init__(self, doc: str, spelled: dict[str, str] | None = None, json: bool = True):
        (name,) = re.findall(r"labs/(\w+\.py)", doc.split("\n\n")[0])
        self.parser = LabParser(prog=name, description=doc.split("\n\n")[1], spelled=spelled)
        self.args = argparse.Namespace()
        self._several: dict[str, Sequence[str]] = {}
        self._files = ["json"] if json else []
        self._here = Ranks(0, 1, "cpu", False)
        if json:
            add_json_argument(self.parser)

    def option(self, name: str, **more) -> None:
        """An option of the command line, as argparse has it."""
        self.parser.add_argument(name, **more)

    def several(self, name: str, choices: Sequence[str], metavar: str = "NAME") -> None:
        """An option that may be repeated; ``chosen`` says what was asked for."""
        self._several[name] = choices
        words = f"one of {', '.join(choices)}; may be repeated (default: all)"
        self.parser.add_argument(f"--{name}", action="append", choices=tuple(choices), metavar=metavar, help=words)

    def dtype(self) -> None:
        """--dtype, for what takes no times."""
        words = "of the activations (default: bfloat16)"
        self.parser.add_argument("--dtype", choices=tuple(ELEMENT_SIZES), default="bfloat16", help=words)

    def page(self, what: str = "the figure") -> None:
        """--html FILE."""
        self.file("html", f"write {what} (needs plotly)")

    def file(self, name: str, what: str) -> None:
        """An option that names a file to write."""
        self._files.append(name)
        self.parser.add_argument(f"--{name}", type=Path, metavar="FILE", help=what)

    @contextmanager
    def asked(self) -> Iterator[argparse.Namespace]:
        """The arguments.  A ConfigError of the block, or a file that can't be written, is the parser's one line."""
        self.args = self.parser.parse_args()
        with self.parser.refusing():
            check_files(self.args, *self._files)
            yield self.args

    def alone(self) -> None:
        """Raise ConfigError under torchrun."""
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            raise ConfigError("started by torchrun", f"needs a single process: python labs/{self.parser.prog}")

    def chosen(self, name: str) -> list[str]:
        """What was asked for of an option of ``several``, in the order of the choices."""
        asked = getattr(self.args, name) or self._several[name]
        return [one for one in self._several[name] if one in asked]

    @contextmanager
    def ranks(self, real_tensors: bool = False) -> Iterator[Ranks]:
        """All ranks, each with the same seed."""
        torch.manual_seed(1234)
        with ranks(self.args, real_tensors=real_tensors) as self._here:
            yield self._here

    def gathered(self, own: Sequence) -> list:
        """What all ranks found, one after the other.  Every rank must call it."""
        return [one for of_rank in self._here.gather(own) for one in of_rank]

    @contextmanager
    def status(self, text: str) -> Iterator[Callable[[str], None]]:
        """A line on rank 0 while something is measured; what it yields changes the line."""
        with Console(stderr=True, quiet=self._here.rank > 0).status(text) as line:
            yield line.update

    def progress(self, text: str = "") -> None:
        """Overwrite the last line on rank 0's screen; does nothing if stderr is a file."""
        if self._here.rank == 0 and sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    @property
    def clock(self) -> str:
        """How times are taken, in words."""
        return "CUDA events" if self.args.device == "cuda" else "wall clock"

    def show(self, *parts: RenderableType, **look) -> None:
        """Print tables and sentences, on rank 0."""
        if self._here.rank == 0:
            for part in parts:
                lab_console().print(part, highlight=False, **look)

    def wrong(self, *sentences: str) -> None:
        """Print what does not agree."""
        self.show(*sentences, style="bold red", markup=False)

    def write(self, document: object) -> None:
        """Put what was found into the file of --json; results of ``actmem_course.results`` are objects of their fields."""
        if self._here.rank == 0 and self.args.json:
            text = json.dumps(document, default=plain, ensure_ascii=False, indent=1)
            write_text(self.args.json, text + "\n")

    def draw(self, make: Callable[[], Drawing]) -> None:
        """Make the figure of --html."""
        if self._here.rank == 0 and self.args.html:
            from actmem_course.lab_figures import write_page  # plotly is loaded only to draw

            with replacing(self.args.html) as beside:
                write_page(make(), beside)
            self.show(f"wrote {self.args.html}")
