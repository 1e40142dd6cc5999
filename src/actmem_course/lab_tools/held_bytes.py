"""Measure the bytes that a module holds between forward and backward, and the peak of both passes.

On a GPU the peak comes from the allocator, to the byte. On a CPU the results of all operations are tracked, and those
still alive are added up after each operation; memory that a kernel allocates and frees internally is not seen.
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
    """A module with its input, to be measured or timed.

    Each run of ``run`` gives the module a copy of the input, which stands for the output of the layer before. The
    copy's bytes count while the copy is alive.

    Attributes:
        module: takes one tensor and returns one tensor.
        leaf: the input, which requires a gradient.
    """

    module: nn.Module
    leaf: Tensor

    def work(self) -> Work:
        """Return the module's forward and backward as ``Work``, which ``timing.take_turns`` can time.

        The input isn't copied here; gradients are freed after each step, outside the time.
        """
        return Work(lambda: self.module(self.leaf), _backward, self.clear_gradients)

    def run(self) -> None:
        """Run forward and backward once, on a copy of the input; the gradients stay in memory."""
        _backward(self.module(self.leaf.clone()))

    def clear_gradients(self) -> None:
        """Free the gradients of the input and of the module's parameters."""
        self.leaf.grad = None
        for parameter in self.module.parameters():
            parameter.grad = None


def layer_runner(
    shape: ModelShape, tp: TensorParallel, device: str, dtype: torch.dtype, recompute: str = "none"
) -> Runner:
    """Make a runner of this rank's shard of the paper's layer, with a random input.

    Args:
        shape: the layer's sizes, unsharded.
        tp: the ranks that share the layer, and whether they use sequence parallelism.
        device: "cpu" or "cuda".
        dtype: of the weights and the input.
        recompute: what backward recomputes: "none", "selective", "full", or another mode of TransformerLayer.
    """
    layer = TransformerLayer(shape, tp, recompute=recompute, device=device, dtype=dtype)
    return Runner(layer, layer_input(shape, tp, device, dtype))


def _backward(output: Tensor) -> None:
    output.backward(output.detach())


def held_by(runner: Runner) -> dict[str, int]:
    """Measure the bytes that a runner holds between forward and backward, and the peak of both passes.

    Tensors that exist before forward (parameters and input) don't count.  The module runs three times: twice under the
    ledger, of which the second run counts, and once for the peak.

    Args:
        runner: the module with its input.

    Returns: what labs write to JSON.
        ``held_bytes``: bytes held between forward and backward, counted by the ledger.
        ``peak_bytes``: the most bytes alive at once in forward or backward; gradients of parameters count.
    """
    for _ in range(2):  # workspaces, compiled kernels and cached weights are made once
        with record(runner.module) as ledger:
            output = runner.module(runner.leaf.clone())
        _backward(output)
        del output
        runner.clear_gradients()
    peak = _allocator_peak(runner) if runner.leaf.is_cuda else live_peak(runner)
    runner.clear_gradients()
    return {"held_bytes": ledger.total_bytes, "peak_bytes": peak}


def _allocator_peak(runner: Runner) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    runner.run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def live_peak(runner: Runner) -> int:
    """Return the most bytes of storages that are alive at once during forward and backward.

    Call this function after a first run of the module, so that buffers made only once don't count.

    Args:
        runner: the module with its input; both, and the module's buffers, don't count.
    """
    live = LiveStorages([runner.leaf, *runner.module.parameters(), *runner.module.buffers()])
    live.peak_bytes = 0
    with live:
        runner.run()
    return live.peak_bytes
