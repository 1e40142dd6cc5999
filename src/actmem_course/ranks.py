"""This process as a rank, started by torchrun or emulated; or as the parent of ranks."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist

# Torch imports this on first use, and the default arguments in it then keep the default group alive.
# Imported here, before there is a group, it keeps none.
import torch.distributed.nn.functional  # noqa: F401

from actmem.config import ConfigError, check_size
from actmem_course.arguments import device_for, gpus_found
from actmem_course.guard import LINE, Guard, say, say_gone
from actmem_course.launch import Ended, ending_raises, loopback_listener, rank_environment
from actmem_course.rank_store import RankStore, connect

#: How long a rank waits for another that is still computing.
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    """All ranks, seen from one.  size: how many; device: this one's; emulated: alone, playing one of many."""

    rank: int
    size: int
    device: str
    emulated: bool

    def gather(self, value: object) -> list:
        """Every rank's ``value``, in the order of the ranks; only this rank's own when emulated."""
        return [value] if self.emulated or self.size == 1 else _store().gather(value)


@cache
def _store() -> RankStore:
    return connect("gather", TIMEOUT.total_seconds())


def add_rank_arguments(parser: argparse.ArgumentParser, emulate: bool = True) -> None:
    """--device; --ranks N; --emulate T where one rank can do the work alone."""
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="without torchrun: start N ranks here (default: one a GPU)"
    )
    if emulate:
        parser.add_argument(
            "--emulate", type=int, metavar="T", help="be one rank of T in a single process, without torchrun"
        )
    else:
        parser.set_defaults(emulate=None)
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="default: GPUs if there is one for each rank" + (" (CPU with --emulate)" if emulate else ""),
    )
    parser.set_defaults(can_emulate=emulate)


def check_ranks(args: argparse.Namespace, script: str) -> int:
    """How many ranks there will be; ``args.device`` is "cpu" or "cuda" from here on, on all of a host's ranks.

    Raises ConfigError if the arguments and the start do not fit.
    """
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    wanted = getattr(args, "ranks", None)
    if wanted is None and not started and args.emulate is None and args.device != "cpu" and torch.cuda.is_available():
        wanted = torch.cuda.device_count()  # a rank for each GPU
    if wanted is not None and LINE not in os.environ:
        if started or args.emulate is not None:
            other = "torchrun has started the ranks" if started else "--emulate needs none"
            raise ConfigError("ranks", f"{other}: leave one of them out")
        sys.exit(start_ranks(sys.argv[0], sys.argv[1:], check_size("ranks", wanted, largest=64)))
    if args.emulate is not None:
        if started:
            raise ConfigError("emulate", f"needs a single process: python labs/{script} --emulate {args.emulate}")
        size = check_size("emulate", args.emulate, largest=65536)
    elif started:
        size = int(os.environ["WORLD_SIZE"])
    else:
        alone = f", or python labs/{script} --emulate 8" if args.can_emulate else ""
        raise ConfigError(
            "not started by torchrun",
            f"run torchrun --nproc-per-node 2 labs/{script}{alone}, or python labs/{script} --ranks 2",
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.emulate is not None:
        fakes = getattr(args, "can_fake_cuda", False) and torch.version.cuda is not None
        # It stays on the CPU unless asked: there it needs no memory.
        args.device = device_for(args.device, 1, int(gpus or fakes) if args.device == "cuda" else 0)
    else:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        asked, args.device = args.device, device_for(args.device, local, gpus, alone=local == size)
        if asked == "auto" and args.device == "cpu" and gpus:
            args.instead = f"{script}: {local} ranks and only {gpus_found(gpus)} here: they run on the CPU"
    return size


@contextmanager
def ranks(args: argparse.Namespace, real_tensors: bool = False) -> Iterator[Ranks]:
    """Join the process group (NCCL on GPUs, gloo on CPUs, fake when emulated) and leave it at the end.

    real_tensors: an emulated rank works on real tensors on a CPU too, as it must to be timed.
    """
    device = args.device
    if args.emulate is not None:
        # Loaded only here: real ranks need neither, and a lab's --help should not wait for them.
        from actmem.ledger.emulate import emulated_rank
        from actmem_tools.no_device import cuda_without_device

        stand_in = cuda_without_device() if device == "cuda" and not torch.cuda.is_available() else nullcontext()
        with emulated_rank(args.emulate, device=device, real_tensors=real_tensors), stand_in:
            yield Ranks(0, args.emulate, device, emulated=True)
        return
    if os.environ["RANK"] == "0" and (instead := getattr(args, "instead", "")):
        print(instead, file=sys.stderr, flush=True)  # only now: bad input is one line
    guard = Guard()
    guard.start()
    if _store_is_served():
        guard.store = connect("guard")  # so that of all ranks that can't start one says why
    join_group(device)
    if guard.store.store is None:
        guard.store = connect("guard")
    guard.met = True
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size(), device, emulated=False)
        dist.barrier()  # no rank leaves while another still talks to it
    except BaseException as error:
        # To destroy a group of NCCL may wait for the other ranks, which wait for this one: first say what is wrong.
        if isinstance(error, (KeyboardInterrupt, SystemExit)) or dist.get_world_size() == 1:
            end_group()
        raise
    end_group()
    if Guard.current:  # after an error it stays, and ends the other ranks
        Guard.current.stop()


def _store_is_served() -> bool:
    """Whether what started this rank serves the store.  Ends this rank if that is gone: joining would wait for minutes.

    Where torchrun serves it, as usual, it did so before it started any rank.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return False
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=60).close()
    except ConnectionRefusedError:
        say_gone()
    except OSError:
        return False  # the process group says what is wrong
    return True


def join_group(device: str) -> None:
    """Make the process group: NCCL's with a GPU for each rank, or gloo's."""
    if device == "cuda":
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)
        dist.init_process_group("nccl", device_id=gpu, timeout=TIMEOUT)
    else:
        _stay_on_this_host()
        dist.init_process_group("gloo", timeout=TIMEOUT)


def _stay_on_this_host() -> None:
    """Where all ranks are on this host, let gloo listen for nobody else: on its loopback interface."""
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        if loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


def end_group() -> None:
    """Destroy all process groups, and free what keeps them alive in reference cycles.

    gloo's threads end with the last reference to a group. One that still runs when the interpreter
    ends can free a tensor that has a Python object, and that aborts the process.
    """
    _store.cache_clear()
    dist.destroy_process_group()
    gc.collect()


# Ranks on this machine without torchrun, under one parent that knows what becomes of each.
# The parent serves the store where the ranks meet, on this machine only.  It holds a line to every
# rank: a rank says on it that it has come to its end, and hears on it that the parent is gone.

#: How long ranks that are told to end may take: one may have a verdict to print.
GRACE_SECONDS = 8


@dataclass
class StartedRank:
    """One rank's process, and the parent's end of the line to it."""

    number: int
    process: subprocess.Popen
    line: socket.socket

    def state(self) -> str:
        """ "runs", "done", or how it ended before its end."""
        code = self.process.poll()
        if code is None:
            return "runs"
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        if code:
            return "failed"  # it has said why
        with self.line.dup() as line:
            line.setblocking(False)
            try:
                return "done" if line.recv(1, socket.MSG_PEEK) else "ended without a word"
            except OSError:
                return "ended without a word"


def start_ranks(script: str, arguments: list[str], size: int) -> int:
    """Run ``script`` as ``size`` ranks and return the exit code: 0 if all came to their end with 0.

    When a rank ends in another way, the others are told to end, as torchrun does.
    """
    program = os.path.basename(script)
    with ending_raises(), served_store() as address:
        ranks = [_start(script, arguments, size, number, address) for number in range(size)]
        try:
            while all(rank.state() in ("runs", "done") for rank in ranks) and any(r.state() == "runs" for r in ranks):
                time.sleep(0.05)
            failed = _end(ranks)
        except KeyboardInterrupt:
            _end(ranks)
            return 130
        except Ended as ended:
            _end(ranks)
            say(f"{program}: ended by {signal.Signals(ended.args[0]).name}")
            return 128 + ended.args[0]
    if failed and failed[0].state() != "failed":
        say(f"{program}: rank {failed[0].number} {failed[0].state()}")
    code = ranks[0].process.returncode
    return code if code in (1, 2, 130) else 1 if failed else code


def _start(script: str, arguments: list[str], size: int, number: int, address: tuple[str, int]) -> StartedRank:
    ours, theirs = socket.socketpair()
    environment = rank_environment(number, size, address) | {LINE: str(theirs.fileno())}
    command = [sys.executable, script, *arguments]
    with theirs:
        return StartedRank(number, subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()]), ours)


def _end(ranks: list[StartedRank]) -> list[StartedRank]:
    """End what still runs; the ranks that failed by themselves, the likeliest cause first."""
    states = [rank.state() for rank in ranks]  # asked once: a rank that ends in between would be in neither list
    failed = [rank for rank, state in zip(ranks, states) if state not in ("runs", "done")]
    told = [rank for rank, state in zip(ranks, states) if state == "runs"]
    for rank in told:
        rank.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE_SECONDS
    while any(rank.state() == "runs" for rank in told) and time.monotonic() < deadline:
        time.sleep(0.05)
    for rank in told:
        if rank.state() == "runs":
            rank.process.kill()
        rank.process.wait()
        if rank.state() == "failed":
            failed.append(rank)
    return sorted(failed, key=lambda rank: ("failed", "was ended", "ended without").index(_kind(rank)))


def _kind(rank: StartedRank) -> str:
    return " ".join(rank.state().split()[:2])


@contextmanager
def served_store() -> Iterator[tuple[str, int]]:
    """A store for the ranks, which nobody on another machine can reach."""
    with loopback_listener() as listener:
        host, port = listener.getsockname()
        served = dist.TCPStore(
            host, port, None, True, timedelta(seconds=50), wait_for_workers=False, master_listen_fd=listener.detach()
        )
    yield host, port
    del served
