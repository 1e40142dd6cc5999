"""What the labs that take times have in common: their options, and the machine's limits."""

from __future__ import annotations

import argparse
import os
import platform
from importlib.metadata import version

import torch

from actmem.config import ConfigError, check_size
from actmem_course.arguments import ELEMENT_SIZES

#: What a lab says below times of an emulated rank.
EMULATED = (
    "One emulated rank: exchanges send nothing here. These are times of computing, and of the copies that torch's fake "
    "gathers make."
)

#: The layer that these labs time by default (``measure_speed.timed_shape``).
LAYER = "tiny; 22B on GPUs with room for it"


def add_timing_arguments(parser: argparse.ArgumentParser) -> None:
    """--dtype and --rounds."""
    parser.add_argument(
        "--dtype",
        choices=tuple(ELEMENT_SIZES),
        help="of the activations (default: bfloat16 on GPUs that have it, else float16; float32 on CPUs)",
    )
    parser.add_argument(
        "--rounds", type=int, default=20, metavar="N", help="how often each is timed (default: %(default)s)"
    )


def check_timing(args: argparse.Namespace) -> str:
    """The dtype's name, chosen if none is given.  Raises ConfigError on a bad number of rounds."""
    check_size("rounds", args.rounds, largest=100_000)
    return args.dtype or usual_dtype(args.device)


def usual_dtype(device: str) -> str:
    """What one trains in there.  GPUs before sm_80, a T4 among them, have no bfloat16: torch emulates it, slowly."""
    if device == "cpu":
        return "float32"
    return "bfloat16" if torch.cuda.get_device_properties(local_rank()).major >= 8 else "float16"


def memory_bytes(device: str) -> int:
    """Bytes of this rank's GPU, or of the machine.

    All of it, not what is free: ranks on equal GPUs must come to the same verdict, and asking what
    is free would open a context on a GPU before the rank has chosen its own.
    """
    if device == "cuda":
        return torch.cuda.get_device_properties(local_rank()).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(bytes_of_a_rank: int, ranks_here: int, memory_bytes: int, remedy: str = "take smaller sizes") -> None:
    """Raise ConfigError if real tensors of that many ranks do not fit into memory.  remedy: what to do then."""
    needed, there = (size / 2**30 for size in (bytes_of_a_rank * ranks_here, memory_bytes))
    if needed > there:
        rule = (
            f"{ranks_here} ranks need about {needed:.1f} GiB for real tensors, and there are {there:.1f} GiB; {remedy}"
        )
        raise ConfigError("model shape", rule)


def local_rank() -> int:
    """This rank's number on its host, and its GPU's."""
    return int(os.environ.get("LOCAL_RANK", 0))


def ranks_here(args: argparse.Namespace) -> int:
    """How many ranks share the memory of ``memory_bytes``."""
    if args.emulate is not None or args.device == "cuda":
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # as ``check_ranks`` has it


def device_name(device: str) -> str:
    """The GPU's or the processor's own name."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def setting(shape, ranks, dtype: str) -> str:
    """Two lines for a title: sizes and dtype; ranks, device and torch's version."""
    a, b, h, s = shape.letters()
    how = f"emulated rank 0 of {ranks.size}" if ranks.emulated else f"{ranks.size} rank{'s' * (ranks.size > 1)}"
    return f"s={s} b={b} h={h} a={a}, {dtype}\n{how} on {device_name(ranks.device)}, torch {version('torch')}"
