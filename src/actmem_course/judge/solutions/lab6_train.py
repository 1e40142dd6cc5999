"""python my/labs/lab6_train.py

Lab 6: put it together.  Train a small GPT on the source of Python's standard library, under every
mode of 2205.05198 table 2, on the same ranks; the loss curves must be equal.  You write the model, the
gradient's norm and the step; batch and train are written for you.

Write the functions below in your own copy of this file, which make labs puts into my/labs.  The
command above judges them on four ranks (--ranks 2 for two).  For a hint, add --hint 6.1.

A mode is a row of table 2: mode.tensor_parallel, mode.sequence_parallel (bool), mode.recompute.
GPT(shape, tp, recompute=…) is the course's model: tp says how ranks share it; model(tokens) gives
logits, model.loss(logits, targets) the mean loss of a batch, model.tp is that tp.
A parameter that is sharded among the ranks of tp has an attribute partition_dim, the dimension.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from actmem.config import ModelShape
from actmem.formulas.activations import Configuration
from actmem.layers.gpt import GPT
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import reduce_partial_gradients

SEED = 1234
NUM_MICROBATCHES = 2
LEARNING_RATE = 3e-3
MAX_NORM = 1.0


# given: the data of a step
def batch(text: Tensor, step: int, seq_length: int, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and next-token targets of one step, the same on every rank.

    Args:
        text: [length], token ids.
        step: the number of the step, from 0; the pieces of text are drawn with a seed made from it.
        seq_length: tokens of one sequence.
        batch_size: sequences of the whole batch, all microbatches together.

    Returns:
        Tokens, [batch_size, seq_length]: pieces of text.
        Targets, [batch_size, seq_length]: for each position the token that follows.

    Source: 2205.05198 table 3 has the paper's batches.
    """
    starts = torch.randint(len(text) - seq_length, (batch_size,), generator=torch.Generator().manual_seed(SEED + step))
    windows = text[starts.to(text.device).unsqueeze(1) + torch.arange(seq_length + 1, device=text.device)]
    return windows[:, :-1], windows[:, 1:]


# 6.1
def make_model(shape: ModelShape, mode: Configuration, group, *, dropout: float = 0.0, **factory) -> GPT:
    """Make a GPT for one mode, sharded over the ranks of group if mode.tensor_parallel is True.

    GPT draws its weights from a seed: the unsharded weights are the same in every mode and for any number of ranks.

    Args:
        shape: the model's sizes.
        mode: a row of table 2.  Without tensor parallelism every rank has the whole model: TensorParallel().
        group: the process group whose ranks share the model.
        dropout: the dropouts' probability, from 0 to 1; GPT calls it p.
        factory: the keyword arguments dtype and device, which GPT takes as well.

    Returns:
        The GPT, with this rank's shards of the parameters.

    Source: 2205.05198 table 2.
    """
    tp = tensor_parallel(group, sequence_parallel=mode.sequence_parallel) if mode.tensor_parallel else TensorParallel()
    return GPT(shape, tp, recompute=mode.recompute, p=dropout, seed=SEED, **factory)


# 6.2
def gradient_norm(model: GPT) -> float:
    """Return the 2-norm of the unsharded model's gradient, the same number on every rank of model.tp.

    Args:
        model: the GPT after backward: every parameter has its .grad, already summed over the ranks where that is
            needed.  A parameter with the attribute partition_dim is sharded, and so is its .grad.

    Returns:
        The norm over all parameters together, a float.

    Collectives: one, of a single number, is enough.
    Source: 2205.05198 section 4.2.1 shards the parameters.
    """
    cut = whole = next(model.parameters()).new_zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        square = parameter.grad.double().square().sum()
        if hasattr(parameter, "partition_dim"):
            cut = cut + square
        else:
            whole = whole + square
    if model.tp.size > 1:
        dist.all_reduce(cut, group=model.tp.group)
    return math.sqrt(cut + whole)


# 6.3
def training_step(
    model: GPT, optimizer: torch.optim.Optimizer, microbatches: list[tuple[Tensor, Tensor]], max_norm: float
) -> float:
    """Run one step: compute the gradient of the mean loss over all microbatches, clip it, and call optimizer.step().

    Afterwards the parameters must be those that the unsharded model has after the same step.  Under sequence
    parallelism some gradients are only this rank's part of a sum until you call reduce_partial_gradients(model,
    model.tp).

    Args:
        model: the GPT from make_model.
        optimizer: of the model's parameters; call its zero_grad() before you compute the gradient.
        microbatches: a pair (tokens, targets) for each microbatch, both [b, s].
        max_norm: if the gradient's norm is larger, scale the gradient down to this norm.

    Returns:
        The mean loss over all microbatches, a float.

    Source: 2205.05198 section 4.2.2.
    """
    optimizer.zero_grad()
    total = 0.0
    for tokens, targets in microbatches:
        loss = model.loss(model(tokens), targets) / len(microbatches)
        loss.backward()
        total += loss.item()
    reduce_partial_gradients(model, model.tp)
    norm = gradient_norm(model)
    if norm > max_norm:
        for parameter in model.parameters():
            parameter.grad *= max_norm / norm
    optimizer.step()
    return total


# 6.4
# given: what puts the three together
def train(shape: ModelShape, mode: Configuration, text: Tensor, num_steps: int, group, **factory) -> list[float]:
    """Train a GPT in one mode, and return the loss of each step; the losses must be the same in every mode.

    Args:
        shape: the model's sizes.
        mode: a row of table 2.
        text: [length], token ids.
        num_steps: how many steps to train.
        group: the process group whose ranks share the model.
        factory: the keyword arguments dtype and device, for make_model.

    Returns:
        The mean loss of each step, one float per step.

    Source: 2205.05198 section 6.
    """
    model = make_model(shape, mode, group, **factory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(num_steps):
        tokens, targets = batch(text, step, shape.seq_length, NUM_MICROBATCHES * shape.micro_batch_size)
        microbatches = list(zip(tokens.chunk(NUM_MICROBATCHES), targets.chunk(NUM_MICROBATCHES)))
        losses.append(training_step(model, optimizer, microbatches, MAX_NORM))
    return losses
