"""Command lines of the labs: the same options everywhere, and one line for bad input.

A wrong argument ends the lab with exit code 2. Under torchrun all ranks parse the same line, so each finds the same
fault. Rank 0 prints it and exits with 2. The others exit with 0 and print nothing, because torchrun stops every rank as
soon as one fails and could stop rank 0 before it has printed.
"""

import argparse
import json
import os
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from actmem.config import ConfigError
from actmem_tools.command_line import counted

#: The environment variable that is set if ``--ranks`` started this rank: its parent prints the error of the first rank
#: that failed.
PARENT_REPORTS = "ACTMEM_PARENT_REPORTS"


def device_for(asked: str, ranks: int, gpus: int, alone: bool = True) -> str:
    """Return "cuda" or "cpu", the device for all ranks of this host.

    If there are fewer GPUs than ranks, the ranks run on the CPU.

    Args:
        asked: "auto", "cpu" or "cuda".
        ranks: how many ranks run on this host.
        gpus: how many GPUs this host has.
        alone: whether all ranks of the job run on this host.

    Raises: ConfigError if there are fewer GPUs than ranks, and either "cuda" is asked for or the job has other hosts
        (whose ranks may have enough GPUs and would then run on them).
    """
    if asked == "cuda" and not gpus:
        raise ConfigError("device", "torch finds no CUDA GPU here")
    if asked == "cpu" or not gpus:
        return "cpu"
    if ranks > gpus and (asked == "cuda" or not alone):
        rule = f"{ranks} processes on this host but {counted(gpus, 'GPU')}: start {gpus}, or add --device cpu"
        raise ConfigError("device", rule)
    return "cuda" if ranks <= gpus else "cpu"


def add_rank_arguments(parser: argparse.ArgumentParser, emulate: bool = True) -> None:
    """Add the options --ranks N and --device to a parser, and --emulate T, to act as one of T ranks.

    Args:
        parser: the lab's parser.
        emulate: whether the lab has the option --emulate; if not, ``emulate`` is None in the parsed options.
    """
    parser.add_argument("--ranks", type=int, metavar="N", help="start N ranks here (default: one for each GPU)")
    if emulate:
        parser.add_argument("--emulate", type=int, metavar="T", help="be one rank of T in a single process")
    where = "default: GPUs if there is one for each rank"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help=where)
    parser.set_defaults(emulate=None)


class LabParser(argparse.ArgumentParser):
    """An ArgumentParser that reports an error in one line, on rank 0 only, with exit code 2.

    Args:
        args: positional arguments of ArgumentParser.
        spelled: for arguments whose option has another name, the option that an error about this argument must name:
            {"num_layers": "--layers"}.
        kwargs: keyword arguments of ArgumentParser, such as prog and description.
    """

    def __init__(self, *args, spelled: dict[str, str] | None = None, **kwargs):
        super().__init__(*args, **kwargs)
        self._spelled = spelled or {}

    def error(self, message: str) -> NoReturn:
        if int(os.environ.get("RANK", "0")):
            sys.exit(0)  # see the note at the top of this file
        report_error(self.prog, message)
        sys.exit(2)

    @contextmanager
    def refusing(self):
        """Make a context in which a ConfigError ends the process with this parser's one line of error."""
        try:
            yield
        except ConfigError as error:
            option = self._spelled.get(error.argument, "--" + error.argument.replace("_", "-"))
            known = option in self._option_string_actions
            self.error(f"{option if known else error.argument}: {error.rule}")


def report_error(program: str, message: str) -> None:
    """Print in one line why this process fails, and leave the message for the process that started the ranks.

    A rank that ``--ranks`` started prints nothing: its parent process prints the first error of all ranks.

    Args:
        program: the lab's file name, with which the line begins.
        message: why it fails.
    """
    tell_torchrun(message)
    if PARENT_REPORTS not in os.environ:
        print_error(program, message)


def print_error(program: str, message: str) -> None:
    """Print "``program``: ``message``" on standard error; do nothing if standard error is closed."""
    with suppress(OSError, ValueError):
        print(f"{program}: {message}", file=sys.stderr, flush=True)


def tell_torchrun(message: str) -> None:
    """Write ``message`` to the file from which torchrun, or the parent of ``--ranks``, reads this rank's error."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # The form that torch.distributed.elastic.multiprocessing.errors reads.
        error = {"message": {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}}
        beside = Path(f"{file}.part")
        beside.write_text(json.dumps(error), encoding="utf-8")
        beside.replace(file)  # at once: this rank may be ended over another's error while it writes


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    """Add --json FILE to a parser; ``files.check_files`` checks the file before any work is done."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
