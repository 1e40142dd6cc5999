"""This process as a rank: started by torchrun, or emulated."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from actmem.config import ConfigError, check_size
from actmem.measure.emulate import emulated_rank


@dataclass(frozen=True)
class Ranks:
    """All ranks, seen from one.  size: how many; device: this one's; emulated: alone, playing one of many."""

    rank: int
    size: int
    device: str
    emulated: bool

    def gather(self, value: object) -> list:
        """Every rank's ``value``, in the order of the ranks; only this rank's own when emulated."""
        if self.emulated or self.size == 1:
            return [value]
        values: list = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def add_rank_arguments(parser: argparse.ArgumentParser, emulate: bool = True) -> None:
    """--device, and --emulate T where one rank can do the work alone."""
    if emulate:
        parser.add_argument("--emulate", type=int, metavar="T", help="be one rank of T in a single process, without torchrun")
    else:
        parser.set_defaults(emulate=None)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default: GPUs if there are any" + (" (CPU with --emulate)" if emulate else ""),
    )
    parser.set_defaults(can_emulate=emulate)


def check_ranks(args: argparse.Namespace, script: str) -> int:
    """How many ranks there will be.  Raises ConfigError if the arguments and the start do not fit."""
    under_torchrun = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if args.emulate is not None:
        if under_torchrun:
            raise ConfigError("emulate", f"needs a single process: python labs/{script} --emulate {args.emulate}")
        size = check_size("emulate", args.emulate, largest=65536)
    elif under_torchrun:
        size = int(os.environ["WORLD_SIZE"])
    else:
        alone = f", or python labs/{script} --emulate 8" if args.can_emulate else ""
        raise ConfigError("not started by torchrun", f"run torchrun --nproc-per-node 2 labs/{script}{alone}")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "torch finds no CUDA GPU here")
    if device_type(args) == "cuda":
        local, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
        if local > gpus:
            raise ConfigError("device", f"{local} processes on this host but {gpus} GPUs: start {gpus}, or add --device cpu")
    return size


@contextmanager
def ranks(args: argparse.Namespace, real_tensors: bool = False) -> Iterator[Ranks]:
    """Join the process group (NCCL on GPUs, gloo on CPUs, fake when emulated) and leave it at the end.

    real_tensors: an emulated rank works on real tensors on a CPU too, as it must to be timed.
    """
    device = device_type(args)
    if args.emulate is not None:
        with emulated_rank(args.emulate, device=device, real_tensors=real_tensors):
            yield Ranks(0, args.emulate, device, emulated=True)
        return
    timeout = timedelta(minutes=10)
    if device == "cuda":
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)
        dist.init_process_group("nccl", device_id=gpu, timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, emulated=False)
        dist.barrier()  # no rank leaves while another still talks to it
    finally:
        dist.destroy_process_group()


def device_type(args: argparse.Namespace) -> str:
    """``"cuda"`` or ``"cpu"``: what ``--device`` means here."""
    if args.device != "auto":
        return args.device
    # An emulated rank stays on the CPU unless asked: there it needs no memory.
    return "cuda" if args.emulate is None and torch.cuda.is_available() else "cpu"
