"""The bytes that a module holds between forward and backward, and the most that are alive at once.

On a GPU the allocator knows the peak, to the byte. On a CPU each operation's results are noted, and after every later
operation those still alive are added up; memory that a kernel allocates and frees inside itself is not seen.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from actmem.config import ModelShape
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.census import LiveStorages
from actmem.ledger.measure_layer import layer_input
from actmem.ledger.recorder import record
from actmem.parallel.groups import TensorParallel
from actmem_course.lab_tools.timing import Work


@dataclass(frozen=True)
class Runner:
    """A module and the input that it runs on.

    A copy of the input stands for the output of the layer before, and counts while it is alive.

    Attributes:
        module: takes one tensor and returns one.
        leaf: the input, which requires a gradient.
    """

    module: nn.Module
    leaf: Tensor

    def work(self) -> Work:
        """Return its forward and backward as work that can be timed."""
        return Work(lambda: self.module(self.leaf), _backward, self.clear_gradients)

    def run(self) -> None:
        """Run forward and backward."""
        _backward(self.module(self.leaf.clone()))

    def clear_gradients(self) -> None:
        """Free all gradients."""
        self.leaf.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None


def layer_runner(
    shape: ModelShape, tp: TensorParallel, device: str, dtype: torch.dtype, recompute: str = "none"
) -> Runner:
    """Make the paper's layer as this rank has it, and an input for it."""
    layer = TransformerLayer(shape, tp, recompute=recompute, device=device, dtype=dtype)
    return Runner(layer, layer_input(shape, tp, device, dtype))


def _backward(output: Tensor) -> None:
    output.backward(output.detach())


@dataclass(frozen=True)
class Held:
    """Bytes of one runner, beyond those that existed before forward (parameters and the input).

    Attributes:
        held_bytes: between forward and backward, by the ledger.
        peak_bytes: the most at once, with the parameters' gradients.
    """

    held_bytes: int
    peak_bytes: int


def held_by(runner: Runner) -> Held:
    """Count what a runner holds between forward and backward, and its peak. Nothing is timed."""
    for _ in range(2):  # workspaces, compiled kernels and cached weights are made once
        with record(runner.module) as ledger:
            output = runner.module(runner.leaf.clone())
        _backward(output)
        del output
        runner.clear_gradients()
    peak = _allocator_peak(runner) if runner.leaf.is_cuda else live_peak(runner)
    runner.clear_gradients()
    return Held(ledger.total_bytes, peak)


def _allocator_peak(runner: Runner) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner.run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def live_peak(runner: Runner) -> int:
    """Return the most bytes of live storages during forward and backward.

    Run the module once before, so that what is made only once doesn't count.
    """
    live = LiveStorages([runner.leaf, *runner.module.parameters(), *runner.module.buffers()])
    live.peak_bytes = 0
    with live:
        runner.run()
    return live.peak_bytes
