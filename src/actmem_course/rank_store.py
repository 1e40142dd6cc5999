"""How ranks talk beside their process group: through the store where they met, as JSON.

A learner's collectives may be mismatched, and then nothing that runs over the same process group
can be trusted.  A store is only keys and values, and stays usable whatever the ranks did.  It is
served by what started the ranks (torchrun, or ``start``), so it outlives each of them.

A message is values and known classes, never code.  A pickle runs what its writer likes, and whoever can reach a store
could write one; so what comes out of it is read by rules: JSON's own values, tuples, tensors, and dataclasses of the
reader's own ``MESSAGE_KINDS``.
"""

from __future__ import annotations

import base64
import json
import os
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from actmem_course import results

#: Classes that may be made from a message, by name.
MESSAGE_KINDS: dict[str, type] = {}
Kind = TypeVar("Kind", bound=type)


class BadMessage(ValueError):
    """What was read is no message of ours."""


def message(kind: Kind) -> Kind:
    """Let instances of this dataclass travel."""
    MESSAGE_KINDS[kind.__name__] = kind
    return kind


for _kind in vars(results).values():
    if isinstance(_kind, type) and is_dataclass(_kind):
        message(_kind)


def encoded(value: object) -> bytes:
    """``value`` as JSON.  Raises TypeError for what may not travel."""
    return json.dumps(_plain(value), ensure_ascii=False).encode()


def decoded(text: bytes) -> Any:
    """The value that ``encoded`` was given.  Raises BadMessage on anything else."""
    try:
        return _value(json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError, AssertionError) as error:
        raise BadMessage(f"no message of ours: {type(error).__name__}: {str(error)[:80]}") from None


def _plain(value: object) -> object:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [_plain(one) for one in value]
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
        text = base64.b64encode(raw).decode()
        return {"tensor": str(data.dtype)[6:], "shape": list(data.shape), "raw": text, "device": value.device.type}
    if isinstance(value, tuple):
        return {"tuple": [_plain(one) for one in value]}
    if type(value) in (set, frozenset):
        return {type(value).__name__: [_plain(one) for one in value]}  # type: ignore[attr-defined]
    if type(value) is dict:
        return {"dict": [[_plain(key), _plain(one)] for key, one in value.items()]}
    if is_dataclass(value) and MESSAGE_KINDS.get(type(value).__name__) is type(value):
        own = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {"kind": type(value).__name__, "fields": own}
    raise TypeError(f"a {type(value).__name__} may not travel between ranks")


def _value(plain):
    if isinstance(plain, list):
        return [_value(one) for one in plain]
    if not isinstance(plain, dict):
        return plain
    if "kind" in plain:
        return MESSAGE_KINDS[plain["kind"]](**{name: _value(one) for name, one in plain["fields"].items()})
    if "tensor" in plain:
        dtype = getattr(torch, plain["tensor"])
        raw = bytearray(base64.b64decode(plain["raw"]))
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.reshape(plain["shape"]).to(plain["device"])  # of the same kind; the reader's own, where several are
    if "dict" in plain:
        return {_value(key): _value(one) for key, one in plain["dict"]}
    for made in (tuple, set, frozenset):
        if made.__name__ in plain:
            return made(map(_value, plain[made.__name__]))
    raise ValueError("an object of no known form")


#: How long a judged rank waits for the others' word.  The watchdog, where there is one, speaks earlier.
SECONDS = 50


class RanksLost(Exception):
    """The store is gone, or another rank has not said what this one waits for."""


class RankStore:
    """All ranks, seen from one.  Every rank must make the same calls in the same order."""

    def __init__(self, rank: int = 0, size: int = 1, store: dist.Store | None = None):
        self.rank, self.size = rank, size
        self.store: Any = store  # torch types its values as text; they are bytes
        self._calls = 0
        #: What its user makes once for all ranks, such as process groups.
        self.kept: dict[str, Any] = {}

    def gather(self, value: object) -> list:
        """Every rank's ``value``, in the order of the ranks; anything that ``messages`` can write."""
        self._calls += 1
        return self.exchange(f"gather/{self._calls}", value)

    def exchange(self, key: str, value: object) -> list:
        """The same under a key of the caller's, which may be used once."""
        if self.size == 1:
            return [value]
        self.post(key, value)
        return [self.read(key, rank) for rank in range(self.size)]

    def post(self, key: str, value: object) -> None:
        """Say ``value`` under ``key`` and go on."""
        if self.size > 1:
            with _lost():
                self.store.set(f"{key}/{self.rank}", encoded(value))

    def read(self, key: str, rank: int) -> Any:
        """What ``rank`` said under ``key``, once it has."""
        with _lost():
            return decoded(self.store.get(f"{key}/{rank}"))

    def read_if_posted(self, key: str, rank: int) -> Any:
        """What ``rank`` said under ``key``, or None if it has not."""
        with _lost():
            there = self.store is not None and self.store.check([f"{key}/{rank}"])
        return self.read(key, rank) if there else None

    def count(self, key: str, more: int = 1) -> int:
        """Add to a number that all ranks share, from 0 on; what it is then."""
        with _lost():
            return self.store.add(key, more) if self.store is not None else more


@contextmanager
def _lost():
    try:
        yield
    except dist.DistError as error:
        raise RanksLost(str(error).partition("\n")[0]) from None


def connect(purpose: str, seconds: float = SECONDS) -> RankStore:
    """A connection of one's own to the store; one that waits blocks all of its connection.

    Every rank must have one for each purpose, and each purpose has keys of its own.  Before there is a
    process group, ranks are those of the environment.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        rank, size = dist.get_rank(), dist.get_world_size()
    if size == 1:
        return RankStore()
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=seconds), wait_for_workers=False)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return RankStore(rank, size, dist.PrefixStore(f"actmem/{attempt}/{purpose}", store))
