"""Command lines of the labs: the same options everywhere, and bad input in one line.

A wrong argument ends the lab with exit code 2.  Under torchrun all ranks parse the same line,
so each finds the same fault: rank 0 prints it and exits with 2, the others leave quietly with
0, because torchrun stops every rank as soon as one fails and could cut rank 0 off before it spoke.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from actmem.config import ConfigError
from actmem_tools.command_line import whole_number

#: Set where ``--ranks`` started this rank: its parent prints the error of the first rank that failed.
PARENT_REPORTS = "ACTMEM_PARENT_REPORTS"


def device_for(asked: str, ranks: int, gpus: int, alone: bool = True) -> str:
    """ "cuda" or "cpu" for all ``ranks`` of this host, which has so many GPUs.

    Ranks that don't have a GPU each, and are alone in the job, run on the CPU.  Raises ConfigError if ``asked`` is
    "cuda", or if ranks on other hosts may have GPUs.
    """
    if asked == "cuda" and not gpus:
        raise ConfigError("device", "torch finds no CUDA GPU here")
    if asked == "cpu" or not gpus:
        return "cpu"
    if ranks > gpus and (asked == "cuda" or not alone):
        found = f"{gpus} GPU" if gpus == 1 else f"{gpus} GPUs"
        raise ConfigError("device", f"{ranks} processes on this host but {found}: start {gpus}, or add --device cpu")
    return "cuda" if ranks <= gpus else "cpu"


def add_rank_arguments(parser: argparse.ArgumentParser, emulate: bool = True) -> None:
    """--ranks N and --device; --emulate T where one rank can do the work alone."""
    parser.add_argument("--ranks", type=int, metavar="N", help="start N ranks here (default: one for each GPU)")
    if emulate:
        parser.add_argument("--emulate", type=int, metavar="T", help="be one rank of T in a single process")
    where = "default: GPUs if there is one for each rank"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=where)
    parser.set_defaults(emulate=None)


class LabParser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are one line, on rank 0 only, with exit code 2.

    spelled: options that are shorter than the argument that a ConfigError names.
    """

    def __init__(self, *args, spelled: dict[str, str] | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self.register("type", int, whole_number)
        self._spelled = spelled or {}

    def error(self, message: str) -> NoReturn:
        if int(os.environ.get("RANK", "0")):
            sys.exit(0)  # see the note at the top of this file
        report_error(self.prog, message)
        sys.exit(2)

    @contextmanager
    def refusing(self):
        """Turn a ConfigError of the block into this parser's one line."""
        try:
            yield
        except ConfigError as error:
            option = self._spelled.get(error.argument, "--" + error.argument.replace("_", "-"))
            known = option in self._option_string_actions
            self.error(f"{option if known else error.argument}: {error.rule}")


def report_error(program: str, message: str) -> None:
    """Say in one line why this process fails; of several ranks that ``--ranks`` started, the parent says it once."""
    tell_torchrun(message)
    if PARENT_REPORTS not in os.environ:
        print_error(program, message)


def print_error(program: str, message: str) -> None:
    """A line on standard error, wherever that leads."""
    with suppress(OSError, ValueError):
        print(f"{program}: {message}", file=sys.stderr, flush=True)


def tell_torchrun(message: str) -> None:
    """Let the parent that watches this rank, torchrun or ours, report ``message`` with its exit code."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The form that torch.distributed.elastic.multiprocessing.errors reads.
        error = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        beside = Path(f"{file}.part")
        beside.write_text(json.dumps(error), encoding="utf-8")
        beside.replace(file)  # at once: this rank may be ended over another's error while it writes


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """--json FILE, checked by ``files.check_files`` before any work is done."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
