"""Run a lab as one rank of many: started by torchrun, by ``--ranks``, or emulated.

With ``--ranks`` a parent process starts the ranks, ends all of them if one fails, and prints why. It uses torchrun's
code for watching processes. Unlike torchrun's, its store (where the ranks find each other) listens on the loopback
interface only.
"""

import argparse
import gc
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, SubprocessContext

from actmem.config import ConfigError, check_size
from actmem_course.arguments import PARENT_REPORTS, device_for, print_error
from actmem_course.files import check_files
from actmem_course.launch import rank_environment
from actmem_course.rank_store import RankStore, connect

#: How long a rank waits for another that is still computing.
TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    """This rank, and its connection to the other ranks.

    Attributes:
        rank: this rank's number, from 0.
        size: how many ranks there are.
        device: this rank's device, "cpu" or "cuda".
        emulated: whether this is a single process that acts as one rank of many.
        store: the store through which ranks exchange values.
    """

    rank: int
    size: int
    device: str
    emulated: bool
    store: RankStore = RankStore()

    def gather(self, value: object) -> list:
        """Collect a value from every rank, in rank order; every rank must call this method.

        Args:
            value: this rank's value, made of plain Python values, tensors and sets.

        Returns: the values; if emulated, this rank's value only.
        """
        return self.store.gather(value)


def check_ranks(args: argparse.Namespace, script: str, *files: str) -> int:
    """Decide how many ranks run the lab, and set ``args.device`` to "cpu" or "cuda".

    If the lab needs several ranks and they haven't been started yet (--ranks, or several GPUs), it starts them as
    subprocesses, waits for them, and ends this process with their exit code. It then doesn't return.

    Args:
        args: parsed options of ``add_rank_arguments``; ``args.device`` is changed.
        script: the lab's file name, such as "measure_paper.py", for the error messages.
        files: names of the options with paths of files to write, such as "json"; ``check_files`` checks these files.

    Returns: the number of ranks.

    Raises:
        ConfigError: The options contradict the way in which the lab was started (torchrun or not), or a file can't be
            written.
    """
    check_files(args, *files)
    started = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if args.emulate is not None:
        if started or args.ranks is not None:
            raise ConfigError("emulate", f"needs a single process: python labs/{script} --emulate {args.emulate}")
        # It stays on the CPU unless asked: there it needs no memory.
        args.device = device_for(args.device, 1, gpus if args.device == "cuda" else 0)
        return check_size("emulate", args.emulate, largest=65536)
    if not started:
        wanted = gpus or None if args.ranks is None and args.device != "cpu" else args.ranks  # a rank for each GPU
        if wanted is None:
            run = f"run torchrun --nproc-per-node 2 labs/{script}, or python labs/{script} --ranks 2"
            raise ConfigError("not started by torchrun", run)
        sys.exit(start_ranks(sys.argv[0], sys.argv[1:], check_size("ranks", wanted, largest=64)))
    if args.ranks is not None and PARENT_REPORTS not in os.environ:
        raise ConfigError("ranks", "torchrun has started the ranks: leave it out")
    size, local = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    args.device = device_for(args.device, local, gpus, alone=local == size)
    return size


@contextmanager
def ranks(args: argparse.Namespace, real_tensors: bool = False) -> Iterator[Ranks]:
    """Make a context in which this process has joined the process group: NCCL, gloo, or a fake one if emulated.

    It also seeds torch, so that all ranks draw the same random numbers. If the block raises, the group isn't destroyed:
    NCCL could wait for the other ranks, which wait for this one.

    Args:
        args: parsed options of ``add_rank_arguments``, in which ``check_ranks`` has set the device.
        real_tensors: whether an emulated rank uses real tensors on a CPU too, as it must when it is timed.

    Yields: this rank, as ``Ranks``.
    """
    torch.manual_seed(1234)
    if args.emulate is not None:
        # Loaded only here: real ranks don't need it, and a lab's --help should not wait for it.
        from actmem.ledger.emulate import emulated_rank

        with emulated_rank(args.emulate, device=args.device, real_tensors=real_tensors):
            gc.freeze()  # a ledger looks for weights among all objects: imports have made none
            yield Ranks(0, args.emulate, args.device, emulated=True)
        return
    end_with_parent()
    join_group(args.device)
    store = connect("gather", TIMEOUT.total_seconds())
    gc.freeze()  # as above
    yield Ranks(store.rank, store.size, args.device, False, store)
    dist.barrier()  # no rank leaves while another still talks to it
    # From here on each rank ends by itself: exit code 1 of one, a lab's result, must not cut off another's output.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    dist.destroy_process_group()


def join_group(device: str) -> None:
    """Initialize torch's process group: NCCL on "cuda", gloo on "cpu"; gloo uses loopback if there is one host only."""
    if device == "cuda":
        gpu = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(gpu)
        dist.init_process_group("nccl", device_id=gpu, timeout=TIMEOUT)
    else:
        interfaces = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
        if interfaces and os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interfaces[0])
        dist.init_process_group("gloo", timeout=TIMEOUT)


def start_ranks(script: str, arguments: list[str], size: int) -> int:
    """Run a script as ``size`` ranks on this machine, and wait for them. If one rank fails, the other ranks are killed.

    Args:
        script: the path of the Python file to run.
        arguments: the file's command-line arguments, the same for every rank.
        size: how many ranks to start.

    Returns: the exit code: 0 if all ranks ended with 0; 130 after Ctrl-C; 128 + n after signal n; 2 if the first rank
        that failed ended with 2; 1 after any other failure.
    """
    program = os.path.basename(script)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # one line of ours says it all
    with served_store() as address, tempfile.TemporaryDirectory() as folder:
        context = SubprocessContext(
            program,
            sys.executable,
            args={rank: (script, *arguments) for rank in range(size)},
            envs={rank: rank_environment(rank, size, address) | {PARENT_REPORTS: "1"} for rank in range(size)},
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            context.start()
            result = context.wait(period=0.05)
        except SignalException as ended:
            context.close(timeout=8)  # seconds that the ranks may take to end
            if ended.sigval != signal.SIGINT:
                print_error(program, f"ended by {ended.sigval.name}")
            return 128 + ended.sigval
    if result is None or not result.failures:
        return 0
    first = min(result.failures.values(), key=lambda failure: failure.timestamp)
    if first.exitcode < 0:
        print_error(program, f"rank {first.local_rank} was ended by {first.signal_name()}")
    elif isinstance(first.message, dict):  # the rank wrote it; without, exit code 1 is a lab's result
        print_error(program, first.message["message"])
    return 2 if first.exitcode == 2 else 1


@contextmanager
def served_store() -> Iterator[tuple[str, int]]:
    """Make a context in which this process serves a store for its ranks, on loopback only.

    Yields: the store's host and port, for ``rank_environment``.
    """
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host, port = listener.getsockname()
        served = dist.TCPStore(
            host, port, None, True, timedelta(seconds=50), wait_for_workers=False, master_listen_fd=listener.detach()
        )
    yield host, port
    del served


def end_with_parent() -> None:
    """Make this rank end on Ctrl-C, and as soon as its parent process is gone, even while it waits in a collective."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
