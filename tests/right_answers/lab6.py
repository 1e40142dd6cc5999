"""Right answers to lab 6: weights, the norm, the step."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard

from actmem.layers.gpt import GPT
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import shard
from actmem_course.judge.solutions import lab6_train as lab6
from tests.right_answers.register import mesh_of, right


@right("6.1")
def make_model_by_rows_of_the_whole(shape, mode, group, *, dropout=0.0, **factory):
    with torch.random.fork_rng():
        torch.manual_seed(99)
        state = GPT(shape, **factory).state_dict()
    tp = tensor_parallel(group, sequence_parallel=mode.sequence_parallel) if mode.tensor_parallel else TensorParallel()
    model = GPT(shape, tp, recompute=mode.recompute, p=dropout, **factory)
    for name, parameter in model.named_parameters():
        part = shard(state[name], getattr(parameter, "partition_dim", None), tp)
        parameter.data.copy_(part)
    return model


@right("6.2")
def gradient_norm_by_dtensor(model):
    if model.tp.size == 1:
        return torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
    mesh = mesh_of(model.tp.group)
    square: Any = 0.0
    for parameter in model.parameters():
        dim = getattr(parameter, "partition_dim", None)
        placement = Replicate() if dim is None else Shard(dim)
        square += DTensor.from_local(parameter.grad, mesh, [placement], run_check=False).norm().full_tensor() ** 2
    return square.sqrt()


@right("6.3")
def step_with_one_backward(model, optimizer, microbatches, max_norm):
    model.zero_grad()
    loss = torch.stack([model.loss(model(tokens), targets) for tokens, targets in microbatches]).mean()
    loss.backward()
    for parameter in model.parameters():
        if getattr(parameter, "partial_gradient", False) and model.tp.size > 1:
            dist.all_reduce(parameter.grad, group=model.tp.group)
    scale = min(1.0, max_norm / lab6.gradient_norm(model))
    torch._foreach_mul_([parameter.grad for parameter in model.parameters()], scale)
    optimizer.step()
    return float(loss)
