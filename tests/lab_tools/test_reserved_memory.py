"""What the allocator reserves for a step, against sums by hand."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from actmem.ledger.emulate import emulated_rank
from actmem.torch_private import fake_tensors
from actmem_course.lab_tools.reserved_memory import ReservedMemory, allocator_bytes
from actmem_course.others.allocator import MEBIBYTE


def mebibytes(mesh=None):
    with fake_tensors():
        linear = nn.Linear(4096, 4096, bias=False)  # 64 MiB
        if mesh is not None:
            fully_shard(linear, mesh=mesh)
        optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
        return [size // MEBIBYTE for size in allocator_bytes(linear, torch.zeros(1, 4096), optimizer)]


def test_weights_and_gradients_of_later_steps_take_the_same_blocks():
    # Weight, gradient, and a segment of what is small, of which little is used.
    assert mebibytes() == [64 + 64, 64 + 64 + 2]


def test_fsdp2_gathers_and_reduces_in_blocks_of_their_own():
    with emulated_rank(2, real_tensors=True):
        # The shard; the gathered weight, made on its own stream, and its copy; the gradient. The gradient's copy, which is
        # to be reduced, takes the block of the weight's, freed just before. What is reduced, on its own stream.
        by_hand = 32 + 64 + 64 + 64 + 32 + 2
        assert mebibytes(init_device_mesh("cpu", (2,)))[1] == by_hand


def test_a_stream_doesnt_take_what_another_has_freed():
    with ReservedMemory([]) as memory, fake_tensors():
        for stream in (torch.cpu.Stream(), torch.cpu.current_stream(), torch.cpu.current_stream()):
            with torch.cpu.stream(stream):
                torch.empty(64 * MEBIBYTE, dtype=torch.uint8)
    assert memory.bytes == 2 * 64 * MEBIBYTE
