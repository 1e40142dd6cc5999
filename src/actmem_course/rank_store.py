"""Let ranks exchange values through torch's key-value store, without collectives.

The judge needs this: if a learner's collectives don't match, the process group can no longer be used. The store still
works. The process that started the ranks serves it, so it outlives each of them.

Messages are read with ``torch.load(weights_only=True)``, because a plain pickle could run code.
"""

import io
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from actmem.torch_private import tree_map_only

#: How long a judged rank waits for the others' values, in seconds.
SECONDS = 50


class BadMessage(ValueError):
    """The bytes that were read are not a message that ``encoded`` made."""


def encoded(value: object) -> bytes:
    """Convert a value to a message: the bytes that ``torch.save`` writes.

    Args:
        value: made of plain Python values, tensors and sets, which ``decoded`` can read.
    """
    written = io.BytesIO()
    torch.save(value, written)
    return written.getvalue()


def decoded(message: bytes) -> Any:
    """Convert a message back to the value that ``encoded`` was given. CUDA tensors are moved to this rank's GPU.

    Args:
        message: bytes from ``encoded``, perhaps of another rank.

    Raises:
        BadMessage: The message has anything but plain values, tensors and sets.
    """
    from_gpus: set[int] = set()

    def on_cpu(storage: Any, place: str) -> Any:
        if place.startswith("cuda"):
            from_gpus.add(storage.data_ptr())
        return storage

    try:
        with torch.serialization.safe_globals([set, frozenset]):
            value = torch.load(io.BytesIO(message), map_location=on_cpu, weights_only=True)
    except Exception as error:
        raise BadMessage(f"no message of ours: {type(error).__name__}") from None
    to_own_gpu = lambda tensor: tensor.cuda() if tensor.untyped_storage().data_ptr() in from_gpus else tensor  # noqa: E731
    return tree_map_only(torch.Tensor, to_own_gpu, value)


class RankStore:
    """A rank's connection to the store that all ranks share. All ranks must make the same calls in the same order.

    Args:
        rank: this rank's number, from 0.
        size: how many ranks there are.
        store: torch's connection; None if there is only one rank, which needs no store.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None):
        self.rank, self.size = rank, size
        self.store: Any = store  # torch types its values as text; they are bytes
        self._calls = 0

    def gather(self, value: object) -> list:
        """Collect a value from every rank, in rank order.

        Args:
            value: this rank's value, made of plain Python values, tensors and sets.
        """
        if self.size == 1:
            return [value]
        self._calls += 1
        self.store.set(f"{self._calls}/{self.rank}", encoded(value))
        return [decoded(self.store.get(f"{self._calls}/{rank}")) for rank in range(self.size)]


def connect(purpose: str, seconds: float = SECONDS) -> RankStore:
    """Open a connection to the ranks' store.

    Open a new connection for each purpose, because a connection is blocked while it waits.

    Args:
        purpose: a name for the connection, such as "gather"; keys of connections with other names are separate. Every
            rank must open a connection with this name.
        seconds: how long ``gather`` waits for another rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return RankStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=seconds), wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RankStore(dist.get_rank(), dist.get_world_size(), dist.PrefixStore(f"actmem/{attempt}/{purpose}", store))
