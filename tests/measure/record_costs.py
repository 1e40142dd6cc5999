"""What recording costs: ``python -m tests.measure.record_costs``, on an idle machine.

A forward pass with ``record`` beside the same pass without, in turn; then a stage of 20 layers of Llama 3 70B on fake
tensors by the command, with its time and its largest memory.
"""

import os
import statistics
import subprocess
import sys
import time

import torch

from actmem.config import TINY
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.recorder import record
from actmem_more.llama import LlamaLayer
from actmem_more.llama_shape import llama_shape

ROUNDS = 40
LAYERS = 20


def stage():
    """A factory for the command: 20 layers of Llama 3 70B on one rank, and an input of 8,192 tokens."""
    shape = llama_shape("llama3-70b")
    layers = torch.nn.Sequential(*(LlamaLayer(shape) for _ in range(LAYERS)))
    return layers, (torch.randn(shape.seq_length, shape.micro_batch_size, shape.hidden_size, requires_grad=True),)


def overhead(shape):
    """Seconds of a forward pass with ``record`` over those without: the median of pairs, and their quartiles."""
    layers = torch.nn.Sequential(*(TransformerLayer(shape) for _ in range(4)))
    x = torch.randn(shape.seq_length, shape.micro_batch_size, shape.hidden_size, requires_grad=True)

    def seconds(recorded):
        start = time.perf_counter()
        if recorded:
            with record(layers):
                y = layers(x)  # noqa: F841 (its graph must live to the end of the block)
        else:
            y = layers(x)  # noqa: F841
        return time.perf_counter() - start

    seconds(True), seconds(False)
    return statistics.quantiles([seconds(True) / seconds(False) for _ in range(ROUNDS)], n=4)


def main():
    for name, sizes in (("tiny", {}), ("small", {"seq_length": 256, "hidden_size": 512, "num_attention_heads": 8})):
        low, median, high = overhead(TINY.with_sizes(**sizes))
        print(
            f"{name}: a recorded forward pass takes {median:.2f} times a plain one (quartiles {low:.2f} to {high:.2f})"
        )
    start = time.perf_counter()
    command = [sys.executable, "-m", "actmem_tools", "record", f"{__file__}:stage", "--fake", "--dtype", "bfloat16"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    print(
        f"{LAYERS} layers of Llama 3 70B, fake: {time.perf_counter() - start:.1f} s, {used.ru_maxrss / 2**20:.2f} GiB"
        f" at most, exit code {os.waitstatus_to_exitcode(status)}; load {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
