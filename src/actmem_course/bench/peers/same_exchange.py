"""Our reduce-scatter in place of torch's, for peers that exchange over gloo.

gloo has no reduce-scatter: torch runs an all-reduce there and discards the rest, twice the bytes.  Ours sends only
what is kept (parallel.collectives).  With the same exchange on both sides, what is left is the layer's own time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from torch import Tensor
from torch.distributed.tensor import placement_types

from actmem.parallel.collectives import reduce_scatter, start_reduce_scatter
from actmem.parallel.groups import TensorParallel


@contextmanager
def our_reduce_scatter(tp: TensorParallel) -> Iterator[None]:
    """In the block, DTensor's and megatron-core's reduce-scatters over ``tp`` are ours."""

    def functional(x: Tensor, op: str, scatter_dim: int, group) -> Tensor:
        assert op.lower() == "sum" and scatter_dim == 0
        return reduce_scatter(x, tp)

    def into(output: Tensor, x: Tensor, group=None, async_op: bool = False) -> SimpleNamespace:
        pending = start_reduce_scatter(x, tp)
        handle = SimpleNamespace(wait=lambda: output.copy_(pending.wait()))
        if not async_op:
            handle.wait()
        return handle

    # DTensor looks it up under another name from torch 2.13 on; megatron-core in two modules, loaded if it is a peer.
    megatron = [sys.modules.get(f"megatron.core.tensor_parallel.{name}") for name in ("layers", "mappings")]
    places = [
        *((placement_types.funcol, name, functional) for name in ("reduce_scatter_single", "reduce_scatter_tensor")),
        *((module, "dist_reduce_scatter_func", into) for module in megatron),
    ]
    with ExitStack() as stack:
        for module, name, ours in places:
            if hasattr(module, name):
                stack.enter_context(patch.object(module, name, ours))
        yield
