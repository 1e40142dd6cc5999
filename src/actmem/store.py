"""Keep a tensor for backward somewhere else, or smaller: in the host's memory, or in eight bits.

``recipes`` says what becomes of each of a layer's tensors, ``drop`` calls these: ``put(flat, name)`` takes a whole
storage as one row of elements, keeps what it needs, and returns a function that makes the row again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem.config import check_sizes
from actmem.keep import keep
from actmem.recipes import BLOCK
from actmem.rows import on_the_host


def stores(actions: Mapping[str, str], host: HostMemory | None) -> dict[str, Store]:
    """The store of each term that is kept elsewhere or smaller, from ``LayerTerms.stored``.  host: None makes one."""
    places: dict[str, Store] = {"offload": host or HostMemory(), "compress": EightBits()}
    return {term: places[action] for term, action in actions.items()}


class Store(Protocol):
    """A place for tensors that backward reads."""

    def put(self, flat: Tensor, name: str) -> Callable[[], Tensor]:
        """Keep ``flat``, one row of elements; the result gives it back, on its device and in its dtype."""


class HostMemory:
    """Keeps tensors in the host's memory while the device computes: two copies for each, one out and one back.

    ahead: how many tensors may be on their way at once.  Forward waits for the oldest copy before it starts one
    more; backward, when it reads a tensor, starts to fetch the ``ahead`` that were put before it and not read yet.
    So besides what is being read the device holds at most that many.  Layers that share one of these fetch across
    their borders.  On a GPU the host's memory is pinned and the copies run on a stream of their own; on a CPU "device"
    and "host" are the same memory, the copies are real, and the ledger lists them as "…, on the host".
    Keeps nothing on the device, and all bytes of the storage on the host, until the layer's graph goes.
    """

    def __init__(self, ahead: int = 1):
        check_sizes(ahead=ahead)
        self.ahead = ahead
        self._put: list[weakref.ref[_HostCopy]] = []  # in the order of the forward pass
        self._leaving: deque[Any] = deque()  # events
        self._streams: dict[torch.device, Any] = {}

    def put(self, flat: Tensor, name: str) -> Callable[[], Tensor]:
        stream = self.stream(flat.device)
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=stream is not None)
        if stream is None:
            host.copy_(flat)
        else:
            while len(self._leaving) >= self.ahead:
                self._leaving.popleft().synchronize()
            stream.wait_stream(torch.get_device_module(flat.device).current_stream(flat.device))
            with torch.get_device_module(flat.device).stream(stream):
                host.copy_(flat, non_blocking=True)
                self._leaving.append(stream.record_event())
            flat.record_stream(stream)  # its memory is free for others once the copy is done
        copy = _HostCopy(self, host, flat.device, name)
        self._put = [reference for reference in self._put if reference() is not None]
        self._put.append(weakref.ref(copy))
        return copy.fetch

    def stream(self, device: torch.device) -> Any:
        """The stream of copies to and from that device; None for a CPU."""
        if device.type == "cpu":
            return None
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return self._streams[device]

    def before(self, copy: _HostCopy) -> list[_HostCopy]:
        """The ``ahead`` copies before this one that nothing has read yet, the latest first."""
        alive = [other for reference in self._put if (other := reference()) is not None]
        earlier = alive[: alive.index(copy)][::-1] if copy in alive else []
        return [other for other in earlier if not other.was_read][: self.ahead]


class _HostCopy:
    """One storage on the host.  arriving: its copy on the device from the start of the fetch until it is read."""

    def __init__(self, memory: HostMemory, host: Tensor, device: torch.device, name: str):
        self.memory, self.device, self.was_read = memory, device, False
        self.kept = keep(host, name=on_the_host(name))
        self.arriving: Tensor | None = None

    def start(self) -> None:
        if self.arriving is not None:
            return
        (host,) = self.kept.tensors()
        stream = self.memory.stream(self.device)
        if stream is None:
            self.arriving = host.clone()
        else:
            with torch.get_device_module(self.device).stream(stream):
                self.arriving = host.to(self.device, non_blocking=True)

    def fetch(self) -> Tensor:
        self.start()
        tensor, self.arriving, self.was_read = self.arriving, None, True
        assert tensor is not None
        if (stream := self.memory.stream(self.device)) is not None:
            current = torch.get_device_module(self.device).current_stream(self.device)
            current.wait_stream(stream)
            tensor.record_stream(current)
        for other in self.memory.before(self):
            other.start()
        return tensor


class EightBits:
    """Keeps whole numbers of 8 bits, and for each block of ``recipes.BLOCK`` elements a float32 scale.

    So 260 bytes for 256 elements where 16 bits take 512.  An element comes back within 1/254 of its block's largest:
    the gradients are those of a backward pass that read the rounded tensor.
    """

    def put(self, flat: Tensor, name: str) -> Callable[[], Tensor]:
        size, dtype = len(flat), flat.dtype
        values, scales = eight_bits(flat)
        kept = keep(values, scales, name=name)
        return lambda: from_eight_bits(*kept.tensors())[:size].to(dtype)


def eight_bits(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Elements ``[n]`` as int8 ``[blocks, 256]``, the last block filled up with zeros, and scales ``[blocks, 1]``."""
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK).float()
    scales = blocks.abs().amax(1, keepdim=True) / 127
    return (blocks / scales.clamp(min=torch.finfo(torch.float32).tiny)).round().to(torch.int8), scales


def from_eight_bits(values: Tensor, scales: Tensor) -> Tensor:
    """The elements in float32, with those that filled up the last block."""
    return (values * scales).flatten()
