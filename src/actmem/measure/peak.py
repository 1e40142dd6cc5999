"""The most bytes that live at once during forward and backward, and what outlives forward.

On a GPU the allocator knows, to the byte.  On a CPU every operation's results are noted and
looked at again after each later operation; what a kernel allocates and frees inside itself is
not seen there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from actmem.measure.ledger import bytes_now, plain_tensors


@dataclass(frozen=True)
class Memory:
    """Bytes beyond those before forward: parameters, and a leaf input, exist already.

    peak_bytes: the most at once, gradients of parameters included.  allocated_bytes: what
    the GPU's allocator set aside for what outlives forward, in blocks of 512 bytes or more;
    requested_bytes: what it was asked for.  Both None on a CPU: there the census tells.
    """

    peak_bytes: int
    allocated_bytes: int | None = None
    requested_bytes: int | None = None


def measure_memory(module: nn.Module, leaf: Tensor) -> Memory:
    """Memory of one forward and backward of ``module`` on a copy of ``leaf``.

    The copy stands for the output of the layer before: it counts exactly as long as it lives.
    Run the module once before, so that what is made only once does not count.
    """
    clear_gradients(module, leaf)
    measured = _on_cuda(module, leaf) if leaf.is_cuda else _on_cpu(module, leaf)
    clear_gradients(module, leaf)
    return measured


def clear_gradients(module: nn.Module, leaf: Tensor) -> None:
    """Let all gradients go."""
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
    existing = (leaf, *module.parameters(), *module.buffers())
    with _LiveStorages({part.untyped_storage()._cdata for tensor in existing for part in plain_tensors(tensor)}) as live:
        _run(module, leaf)
    return Memory(live.peak_bytes)


def _run(module: nn.Module, leaf: Tensor) -> None:
    output = module(leaf.clone())
    output.backward(output.detach())


class _LiveStorages(TorchDispatchMode):
    """Notes the storage of every result, and after every operation adds up those that are still there."""

    def __init__(self, ignored: set[int]):
        super().__init__()
        self._ignored, self._refs = ignored, {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            for part in plain_tensors(tensor) if isinstance(tensor, Tensor) else ():
                storage = part.untyped_storage()
                if storage._cdata not in self._ignored:
                    # The weak reference keeps the address from being given to another storage.
                    self._refs.setdefault(storage._cdata, StorageWeakRef(storage))
        sizes = {key: bytes_now(ref) for key, ref in self._refs.items()}
        self._refs = {key: ref for key, ref in self._refs.items() if not ref.expired()}
        self.peak_bytes = max(self.peak_bytes, sum(sizes.values()))
        return result
