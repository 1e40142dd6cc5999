"""Stores for tensors that backward needs: in the host's memory (offloading), or on the device in 8 bits.

A layer's ``recompute`` says which of its tensors go to a store, and ``drop`` calls the store. ``put(flat, name)`` takes
a whole storage as a tensor of one dimension, and returns a function by which backward gets the tensor back.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from actmem.config import check_sizes
from actmem.keep import keep
from actmem.recipes import BLOCK
from actmem.rows import on_the_host


class HostMemory:
    """Offloads tensors: copies them to the host's memory in forward, and back to the device in backward.

    The copies run while the device computes: on a GPU on a stream of their own, from and to pinned memory. Layers that
    share one HostMemory also prefetch each other's tensors. On a CPU "device" and "host" are the same memory; the
    copies are still made, and a ledger lists them as "…, on the host".

    Args:
        ahead: how many copies may run at once. In forward, a copy to the host waits until fewer than ``ahead`` other
            copies run. In backward, reading a tensor starts the copies of up to ``ahead`` tensors that backward reads
            next.

    Saves: nothing on the device, and all bytes of the storage on the host, until the layer's graph is freed.
    """

    def __init__(self, ahead: int = 1):
        check_sizes(ahead=ahead)
        self.ahead = ahead
        self._last: weakref.ref[_HostCopy] | None = None
        self.arriving: weakref.WeakSet[_HostCopy] = weakref.WeakSet()
        self._leaving: deque[Any] = deque()  # events
        self._streams: dict[torch.device, Any] = {}

    def put(self, flat: Tensor, name: str) -> Callable[[], Tensor]:
        """Start to copy a tensor to the host.

        Args:
            flat: a whole storage, as a tensor of one dimension.
            name: the tensor's name in a ledger, which adds ", on the host".

        Returns: a function that copies the tensor back and returns it.
        """
        stream = self.stream(flat.device)
        place = "meta" if flat.is_meta else "cpu"
        host = torch.empty(flat.shape, dtype=flat.dtype, device=place, pin_memory=stream is not None)
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
        copy = _HostCopy(self, host, flat.device, name, self._last)
        self._last = weakref.ref(copy)
        return copy.fetch

    def __reduce__(self) -> tuple:
        return HostMemory, (self.ahead,)  # a copy of a model starts with nothing on its way

    def stream(self, device: torch.device) -> Any:
        """Return the stream on which copies from and to a device run; None for a CPU and for the meta device."""
        if device.type in ("cpu", "meta"):
            return None
        if device not in self._streams:
            self._streams[device] = torch.get_device_module(device).Stream(device)
        return self._streams[device]


class _HostCopy:
    """One storage on the host.

    Attributes:
        previous: the copy that was put before this one.
        reads: how often the storage was read; more than once if a graph is retained.
        kept: the Kept by which autograd holds the copy on the host.
        arriving: the copy on the device, from the start of the fetch until it is read; else None.
    """

    def __init__(
        self, memory: HostMemory, host: Tensor, device: torch.device, name: str, previous: weakref.ref[_HostCopy] | None
    ):
        self.memory, self.device, self.previous, self.reads = memory, device, previous, 0
        self.kept = keep(host, name=on_the_host(name))
        self.arriving: Tensor | None = None

    def start(self) -> None:
        if self.arriving is not None:
            return
        self.memory.arriving.add(self)
        (host,) = self.kept.read_once()
        stream = self.memory.stream(self.device)
        if stream is None:
            self.arriving = host.clone()
        else:
            with torch.get_device_module(self.device).stream(stream):
                self.arriving = host.to(self.device, non_blocking=True)

    def fetch(self) -> Tensor:
        self.start()
        tensor, self.arriving, self.reads = self.arriving, None, self.reads + 1
        self.memory.arriving.discard(self)
        assert tensor is not None
        if (stream := self.memory.stream(self.device)) is not None:
            current = torch.get_device_module(self.device).current_stream(self.device)
            current.wait_stream(stream)
            tensor.record_stream(current)
        earlier = self.before()
        while earlier is not None and len(self.memory.arriving) < self.memory.ahead:
            if earlier.reads < self.reads:
                earlier.start()
            earlier = earlier.before()
        return tensor

    def before(self) -> _HostCopy | None:
        """Return the copy that was put before this one; None if it has been freed."""
        return self.previous() if self.previous is not None else None


class EightBits:
    """Keeps tensors as 8-bit integers, with a float32 scale for each block of 256 elements (``recipes.BLOCK``).

    A block takes 260 bytes, where 16 bits take 512. Backward reads rounded elements, so gradients are not exact: an
    element's error is at most 1/254 of the largest magnitude in its block, if that is above 1e-35. A block with an
    infinite element comes back as NaN.
    """

    def put(self, flat: Tensor, name: str) -> Callable[[], Tensor]:
        """Save a tensor in 8 bits.

        Args:
            flat: a whole storage, as a tensor of one dimension.
            name: the tensor's name in a ledger.

        Returns: a function that returns the tensor in its dtype, with rounded elements.
        """
        size, dtype = len(flat), flat.dtype
        values, scales = eight_bits(flat)
        kept = keep(values, scales, name=name)
        return lambda: from_eight_bits(*kept.read_once())[:size].to(dtype)


def eight_bits(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return a tensor ``[n]`` rounded to 8-bit integers, with a scale for each block of 256 elements.

    The scale is the block's largest magnitude / 127.

    Returns: int8 ``[blocks, 256]``, with zeros at the end of the last block, and float32 scales ``[blocks, 1]``.
        ``from_eight_bits`` multiplies the two.
    """
    blocks = F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK).float()
    scales = (blocks.abs().amax(1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
    return (blocks / scales).round().to(torch.int8), scales


def from_eight_bits(values: Tensor, scales: Tensor) -> Tensor:
    """Return values · scales in one dimension and in float32, the inverse of ``eight_bits`` up to rounding.

    Args:
        values: int8 ``[blocks, 256]``.
        scales: float32 ``[blocks, 1]``.

    Returns: ``[blocks · 256]``; the zeros that ``eight_bits`` added to the last block are still there.
    """
    return (values * scales).flatten()
