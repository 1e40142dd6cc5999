"""Our reduce-scatter in place of torch's, for peers that exchange over gloo.

gloo has no reduce-scatter: torch runs an all-reduce there and discards the rest, twice the bytes.  Ours sends only
what is kept (parallel.collectives).  With the same exchange on both sides, what is left is the layer's own time.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import placement_types

from actmem.measure.tools import replaced
from actmem.parallel.collectives import start_exchange
from actmem_course.bench.peers import PeerUnavailable
from actmem_course.bench.race import Runner, Work


class SameExchange(Runner):
    """A peer's runner whose reduce-scatters are ours while it is timed."""

    def work(self) -> Work:
        shipped = super().work()

        def forward() -> Tensor:
            with _ours():
                return shipped.forward()

        def backward(output: Tensor) -> None:
            with _ours():
                shipped.backward(output)

        return Work(forward, backward, shipped.finish)


@contextmanager
def _ours() -> Iterator[None]:
    with ExitStack() as stack:
        for module, name, function in _places():
            stack.enter_context(replaced(module, name, partial(_instead, function)))
        yield


def _instead(function: Callable, original: Callable) -> Callable:
    return function


def _places() -> list[tuple[Any, str, Callable]]:
    """Where DTensor and megatron-core look their reduce-scatter up.  Raises PeerUnavailable where torch has no such place."""
    collectives = getattr(placement_types, "funcol", None)
    names = [name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(collectives, name)]
    if not names:
        raise PeerUnavailable("this torch looks up its reduce-scatter elsewhere")
    places: list[tuple[Any, str, Callable]] = [(collectives, name, _functional) for name in names]
    for name in ("layers", "mappings"):
        try:
            module = importlib.import_module(f"megatron.core.tensor_parallel.{name}")
        except ImportError:
            continue
        places.append((module, "dist_reduce_scatter_func", _into))
    return places


def _functional(x: Tensor, op: str, scatter_dim: int, group) -> Tensor:
    """As DTensor calls it.  group: a mesh and one of its dimensions."""
    assert op.lower() == "sum" and scatter_dim == 0
    mesh, dimension = group
    return start_exchange(x, mesh.get_group(dimension)).wait()


def _into(output: Tensor, x: Tensor, group=None, async_op: bool = False) -> _Copy | None:
    """As megatron-core calls it: into a tensor that the caller made."""
    pending = _Copy(output, start_exchange(x, group))
    if async_op:
        return pending
    pending.wait()
    return None


class _Copy:
    def __init__(self, output: Tensor, pending):
        self.output, self.pending = output, pending

    def wait(self) -> None:
        with torch.no_grad():
            self.output.copy_(self.pending.wait())
