"""This machine: its memory, its name, and the dtype that one trains in here."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, TypeVar

import torch

from actmem.config import ConfigError, ModelShape

if TYPE_CHECKING:
    from actmem_tools.command_line import counted
from actmem_course.ranks import Ranks

Shape = TypeVar("Shape")

#: What a lab prints below times of an emulated rank.
EMULATED = (
    "One emulated rank: collectives send nothing here. These are times of computing, and of the copies that torch's "
    "fake gathers make."
)


def usual_dtype(device: str) -> str:
    """Return the dtype in which one trains on this device.

    GPUs before sm_80, such as a T4, have no bfloat16: torch emulates it, slowly. They get float16, CPUs float32.
    """
    if device == "cpu":
        return "float32"
    return "bfloat16" if torch.cuda.get_device_properties(local_rank()).major >= 8 else "float16"


def memory_bytes(device: str) -> int:
    """Return the bytes of memory of this rank's GPU, or of the machine.

    All of it, not what is free: ranks on equal GPUs must reach the same verdict, and asking what is free would open a
    context on a GPU before the rank has chosen its own.
    """
    if device == "cuda":
        return torch.cuda.get_device_properties(local_rank()).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def first_that_fits(
    bytes_of_a_rank: Mapping[Shape, int], args: argparse.Namespace, remedy: str = "take smaller sizes"
) -> Shape:
    """Return the first shape whose real tensors fit into the memory that this host's ranks share.

    Args:
        bytes_of_a_rank: the bytes that each shape needs on one rank.
        remedy: what the error tells the user to do if none fits.

    Raises:
        ConfigError: none fits.
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
    """Return how many ranks share the memory of ``memory_bytes``."""
    if args.emulate is not None or args.device == "cuda":
        return 1
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # as ``check_ranks`` has it


def device_name(device: str) -> str:
    """Return the GPU's or the processor's own name."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def clock_name(device: str) -> str:
    """Return in words how times are taken on this device."""
    return "CUDA events" if device == "cuda" else "wall clock"


def described(shape: ModelShape, here: Ranks, dtype: str) -> str:
    """Return two lines for a title: sizes and dtype; ranks, device and torch's version."""
    a, b, h, s = shape.letters()
    ranks = f"emulated rank 0 of {here.size}" if here.emulated else counted(here.size, "rank")
    return f"s={s} b={b} h={h} a={a}, {dtype}\n{ranks} on {device_name(here.device)}, torch {version('torch')}"
