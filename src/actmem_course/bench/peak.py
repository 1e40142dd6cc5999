"""The most bytes that live at once during forward and backward, and what outlives forward.

On a GPU the allocator knows, to the byte.  On a CPU each operation's results are noted, and after
every later operation those still alive are added up; memory that a kernel allocates and frees
inside itself is not seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from actmem.measure.census import LiveStorages


@dataclass(frozen=True)
class Memory:
    """Bytes beyond those that existed before forward (parameters and a leaf input).

    peak_bytes: the most at once, including gradients of parameters.  allocated_bytes: what the
    GPU's allocator reserved for what outlives forward, in blocks of 512 bytes or more;
    requested_bytes: what was requested of it.  Both are None on a CPU: use the census there.
    """

    peak_bytes: int
    allocated_bytes: int | None = None
    requested_bytes: int | None = None


def measure_memory(module: nn.Module, leaf: Tensor) -> Memory:
    """Memory of one forward and backward of ``module`` on a copy of ``leaf``.

    The copy plays the output of the layer before: it counts exactly as long as it lives.  Run the
    module once first, so that what is allocated only once does not count.
    """
    clear_gradients(module, leaf)
    measured = _on_cuda(module, leaf) if leaf.is_cuda else _on_cpu(module, leaf)
    clear_gradients(module, leaf)
    return measured


def clear_gradients(module: nn.Module, leaf: Tensor) -> None:
    """Free all gradients."""
    leaf.grad = None
    for parameter in module.parameters():
        parameter.grad = None


def _on_cuda(module: nn.Module, leaf: Tensor) -> Memory:
    def current(kind: str) -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_stats()[f"{kind}_bytes.all.current"]

    allocated, requested = current("allocated"), current("requested")
    # Only the graph: the output counts if and only if the graph keeps it.
    graph = module(leaf.clone()).grad_fn
    held = current("allocated") - allocated, current("requested") - requested
    del graph
    torch.cuda.reset_peak_memory_stats()
    _run(module, leaf)
    torch.cuda.synchronize()
    return Memory(torch.cuda.max_memory_allocated() - allocated, *held)


def _on_cpu(module: nn.Module, leaf: Tensor) -> Memory:
    live = LiveStorages([leaf, *module.parameters(), *module.buffers()])
    live.peak_bytes = 0
    with live:
        _run(module, leaf)
    return Memory(live.peak_bytes)


def _run(module: nn.Module, leaf: Tensor) -> None:
    output = module(leaf.clone())
    output.backward(output.detach())
