"""Facts of this machine: its memory, its name, and the dtype that is usual for training on it."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

import torch

from actmem.config import ConfigError
from actmem_tools.command_line import counted

if TYPE_CHECKING:
    from actmem_course.ranks import Ranks

Shape = TypeVar("Shape")

#: What a lab prints below times of an emulated rank.
EMULATED = (
    "One emulated rank: collectives send nothing here. These are times of computing, and of the copies that torch's "
    "fake gathers make."
)


def usual_dtype(device: str) -> str:
    """Return the dtype that is usual for training on this device: "bfloat16", "float16" or "float32".

    GPUs before sm_80, such as a T4, have no bfloat16 (torch emulates it slowly) and get float16. CPUs get float32.

    Args:
        device: "cpu" or "cuda".
    """
    if device == "cpu":
        return "float32"
    return "bfloat16" if torch.cuda.get_device_properties(local_rank()).major >= 8 else "float16"


def memory_bytes(device: str) -> int:
    """Return the total memory, in bytes, of this rank's GPU ("cuda") or of the machine ("cpu").

    It is not the free memory: all ranks must decide alike, and to ask for free memory would open a CUDA context on a
    GPU before the rank has chosen its own.
    """
    if device == "cuda":
        return torch.cuda.get_device_properties(local_rank()).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def first_that_fits(
    bytes_of_a_rank: Mapping[Shape, int], args: argparse.Namespace, remedy: str = "take smaller sizes"
) -> Shape:
    """Return the first shape whose real tensors fit into the memory that this host's ranks share.

    Args:
        bytes_of_a_rank: the bytes that each shape needs on one rank, by the shape, in the order in which to try them.
        args: the lab's parsed options, of which ``device`` and ``emulate`` are used.
        remedy: the end of the error's message: what the user can do.

    Raises:
        ConfigError: No shape fits.
    """
    sharing, there = ranks_here(args), memory_bytes(args.device)
    for shape, needed in bytes_of_a_rank.items():
        if needed * sharing <= there:
            return shape
    sizes = f"{sharing} ranks need about {needed * sharing / 2**30:.1f} GiB for real tensors"
    raise ConfigError("model shape", f"{sizes}, and there are {there / 2**30:.1f} GiB; {remedy}")


def local_rank() -> int:
    """Return this rank's number on its host, which is also the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", 0))


def ranks_here(args: argparse.Namespace) -> int:
    """Return how many ranks share the memory that ``memory_bytes`` returns.

    On a CPU all ranks of this host share it; on GPUs, and if the rank is emulated, the number is 1.

    Args:
        args: the lab's parsed options, of which ``device`` and ``emulate`` are used.
    """
    if args.emulate is not None or args.device == "cuda":
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # as ``check_ranks`` has it


def device_name(device: str) -> str:
    """Return the model name of this rank's GPU ("cuda") or of the processor ("cpu"), such as "NVIDIA H200"."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def clock_name(device: str) -> str:
    """Return the name of the clock that times a device: "CUDA events" for "cuda", "wall clock" for "cpu"."""
    return "CUDA events" if device == "cuda" else "wall clock"


def ranks_in_words(here: Ranks) -> str:
    """Return a line of text for a title, such as "4 ranks on NVIDIA H200, torch 2.13.0".

    Args:
        here: this rank, which knows the number of ranks, the device, and whether it is emulated.
    """
    ranks = f"emulated rank 0 of {here.size}" if here.emulated else counted(here.size, "rank")
    return f"{ranks} on {device_name(here.device)}, torch {version('torch')}"
