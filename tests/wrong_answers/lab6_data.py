"""Wrong answers to the first half of lab 6: data, weights, the norm of a gradient."""

import math
from dataclasses import replace

import torch
import torch.distributed as dist

from actmem.formulas.activations import TABLE2
from actmem.layers.gpt import GPT
from actmem.parallel.groups import TensorParallel, tensor_parallel
from actmem.parallel.linear import load_dense
from actmem_course.judge.solutions import lab6_train as right
from actmem_course.judge.solutions.lab6_train import SEED
from tests.wrong_answers.planted import planted

LAB = "lab6_train"


def pieces(text, starts, seq_length):
    windows = text[starts.unsqueeze(1) + torch.arange(seq_length + 1)]
    return windows[:, :-1], windows[:, 1:]


def starts_of(text, seq_length, batch_size, seed):
    return torch.randint(len(text) - seq_length, (batch_size,), generator=torch.Generator().manual_seed(seed))


@planted(LAB, "6.1", r"targets are the tokens themselves")
def targets_not_shifted(text, step, seq_length, batch_size):
    tokens, _ = right.batch(text, step, seq_length, batch_size)
    return tokens, tokens


@planted(LAB, "6.1", r"shifted the wrong way")
def targets_from_before(text, step, seq_length, batch_size):
    return right.batch(text, step, seq_length, batch_size)[::-1]


@planted(LAB, "6.1", r"ranks have different batches.*data parallelism")
def a_batch_of_its_own_for_each_rank(text, step, seq_length, batch_size):
    return pieces(text, starts_of(text, seq_length, batch_size, 1000 * dist.get_rank() + step), seq_length)


@planted(LAB, "6.1", r"ranks have different batches")
def from_the_default_generator(text, step, seq_length, batch_size):
    return pieces(text, torch.randint(len(text) - seq_length, (batch_size,)), seq_length)


@planted(LAB, "6.1", r"ranks have different batches|the same step gives another batch the second time")
def goes_on_where_it_was(text, step, seq_length, batch_size, state=[0]):  # noqa: B006 (the mistake that is planted)
    state[0] += 1
    return pieces(text, starts_of(text, seq_length, batch_size, state[0]), seq_length)


@planted(LAB, "6.1", r"steps 0 and 1 have the same batch")
def one_batch_for_ever(text, step, seq_length, batch_size):
    return pieces(text, starts_of(text, seq_length, batch_size, SEED), seq_length)


@planted(LAB, "6.1", r"row 0 of tokens is not a piece of text: expected 9 consecutive tokens")
def single_tokens(text, step, seq_length, batch_size):
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - seq_length, (batch_size, seq_length), generator=generator)
    return text[starts], text[starts + 1]


@planted(LAB, "6.1", r"a piece runs over its end")
def over_the_end(text, step, seq_length, batch_size):
    generator = torch.Generator().manual_seed(step)
    return pieces(
        text, torch.randint(len(text), (batch_size,), generator=generator) % (len(text) - seq_length + 1), seq_length
    )


@planted(LAB, "6.1", r"tokens has shape \[9, 4\]; expected \[4, 9\]")
def sequence_first(text, step, seq_length, batch_size):
    return tuple(part.t() for part in right.batch(text, step, seq_length, batch_size))


def made(
    shape, mode, group, dropout, factory, *, seed=SEED, recompute=None, sequence_parallel=None, tensor=None, p=None
):
    """Our make_model, with one thing in it changed."""
    whole = GPT(shape, p=dropout, seed=seed, **factory)
    tensor = mode.tensor_parallel if tensor is None else tensor
    sequence_parallel = mode.sequence_parallel if sequence_parallel is None else sequence_parallel
    tp = tensor_parallel(group, sequence_parallel=sequence_parallel) if tensor else TensorParallel()
    model = GPT(shape, tp, recompute=recompute or mode.recompute, p=dropout if p is None else p, **factory)
    load_dense(model, whole.state_dict(), tp)
    return model


@planted(LAB, "6.2", r"is replicated, but differs between the ranks: pass seed=SEED to GPT")
def a_seed_from_torch(shape, mode, group, *, dropout=0.0, **factory):
    return made(shape, mode, group, dropout, factory, seed=torch.initial_seed())


@planted(LAB, "6.2", r"is replicated, but differs between the ranks")
def a_seed_for_each_rank(shape, mode, group, *, dropout=0.0, **factory):
    return made(shape, mode, group, dropout, factory, seed=SEED + dist.get_rank(group))


@planted(LAB, "6.2", r"the ranks' parts of words.weight are equal, but they are different rows")
def every_rank_takes_the_first_part(shape, mode, group, *, dropout=0.0, **factory):
    model = made(shape, mode, group, dropout, factory)
    load_dense(model, GPT(shape, seed=SEED, **factory).state_dict(), replace(model.tp, rank=0))
    return model


@planted(
    LAB, "6.2", r"mode 'tensor\+selective', dropout=0.1: .*as with recompute='none': pass recompute=mode.recompute"
)
def never_recomputes(shape, mode, group, *, dropout=0.0, **factory):
    return made(shape, mode, group, dropout, factory, recompute="none")


@planted(LAB, "6.2", r"mode 'tensor\+sequence': sequence_parallel is False, but the mode says True")
def no_sequence_parallelism(shape, mode, group, *, dropout=0.0, **factory):
    return made(shape, mode, group, dropout, factory, sequence_parallel=False)


@planted(LAB, "6.2", r"mode 'none': the model is shared among [24] ranks, not 1")
def always_shared(shape, mode, group, *, dropout=0.0, **factory):
    return made(shape, mode, group, dropout, factory, tensor=True)


@planted(LAB, "6.2", r"as if dropout were 0.0: pass p=dropout to GPT")
def dropout_lost(shape, mode, group, *, dropout=0.0, **factory):
    return made(shape, mode, group, dropout, factory, p=0.0)


@planted(LAB, "6.2", r"as if dropout were 0.1: pass p=dropout to GPT")
def dropout_of_the_default(shape, mode, group, *, dropout=0.0, **factory):
    return made(shape, mode, group, dropout, factory, p=0.1)


@planted(LAB, "6.2", r"is not the same as in mode 'none': pass seed=SEED")
def a_seed_for_each_mode(shape, mode, group, *, dropout=0.0, **factory):
    return made(shape, mode, group, dropout, factory, seed=SEED + [known.name for known in TABLE2].index(mode.name))


@planted(LAB, "6.2", r"parameters are float32, although dtype=float64 was given: pass \*\*factory to GPT")
def factory_lost(shape, mode, group, *, dropout=0.0, **factory):
    return made(shape, mode, group, dropout, {})


def squares(model):
    """Sums of squares: of parameters that are cut, and of those that are whole."""
    cut, whole = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        (cut if hasattr(parameter, "partition_dim") else whole).add_(parameter.grad.double().square().sum())
    return cut, whole


def summed(value, model):
    if model.tp.size > 1:
        dist.all_reduce(value, group=model.tp.group)
    return value


@planted(LAB, "6.3", r"only this rank's parameters are counted")
def norm_of_this_rank(model):
    return math.sqrt(sum(squares(model)))


@planted(LAB, "6.3", r"parameters that are replicated are counted t times")
def all_squares_summed(model):
    return math.sqrt(summed(sum(squares(model)), model))


@planted(LAB, "6.3", r"the ranks' norms are added up: add squares")
def norms_added(model):
    return summed(sum(squares(model)).sqrt(), model).item()


@planted(LAB, "6.3", r"the root is missing")
def no_root(model):
    cut, whole = squares(model)
    return (summed(cut, model) + whole).item()


@planted(LAB, "6.3", r"parameters that are replicated are left out")
def only_the_cut_ones(model):
    return math.sqrt(summed(squares(model)[0], model))


@planted(LAB, "6.3", r"a model that is not shared .* is summed over all ranks")
def sums_over_the_world(model):
    cut, whole = squares(model)
    dist.all_reduce(cut)
    return math.sqrt(cut + whole)


@planted(LAB, "6.3", r"a \.grad is changed: only compute the norm")
def torchs_clipping(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()


@planted(LAB, "6.3", r"the largest of the ranks' norms")
def largest_norm(model):
    norm = sum(squares(model)).sqrt()
    if model.tp.size > 1:
        dist.all_reduce(norm, dist.ReduceOp.MAX, group=model.tp.group)
    return norm.item()


@planted(LAB, "6.3", r"the norm is wrong on ranks? 1.* and right elsewhere: every rank needs it, so all-reduce")
def norm_on_one_rank(model):
    cut, whole = squares(model)
    if model.tp.size > 1:
        dist.reduce(cut, 0, group=model.tp.group)
    return math.sqrt(cut + whole)
