"""Wrong answers to lab 3: g, g_bar and the linears."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F
from torch.autograd import Function

from actmem_course.judge.solutions.lab3_sequence_parallel import g
from tests.wrong_answers.lab2_operators import averaged, operator, summed
from tests.wrong_answers.planted import planted

LAB = "lab3_sequence_parallel"


def rank_and_size(group):
    return dist.get_rank(group), dist.get_world_size(group)


def gathered(x, group, dim=0):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, dim)


def gathered_along_the_batch(x, group):
    return gathered(x, group, 1)


def gathered_backwards(x, group):
    return torch.cat(gathered(x, group).chunk(dist.get_world_size(group))[::-1])


def dealt_in_turn(x, group):
    return torch.stack(gathered(x, group).chunk(dist.get_world_size(group)), 1).flatten(0, 1)


def scattered(x, group):
    result = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(result, x.contiguous(), group=group)
    return result


def own_part(x, group):
    rank, t = rank_and_size(group)
    return x.chunk(t)[rank].clone()


def reduced_part(x, group):
    return own_part(summed(x, group), group)


def averaged_part(x, group):
    return scattered(x, group) / dist.get_world_size(group)


def largest_part(x, group):
    result = x.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(result, x.contiguous(), dist.ReduceOp.MAX, group=group)
    return result


def in_the_own_place(x, group):
    rank, t = rank_and_size(group)
    whole = x.new_zeros(x.shape[0] * t, *x.shape[1:])
    whole.chunk(t)[rank].copy_(x)
    return whole


def repeated(x, group):
    return torch.cat([x] * dist.get_world_size(group))


def gathered_on_rank_0(x, group):
    return gathered(x, group) if dist.get_rank(group) == 0 else repeated(x, group)


def assigned(x, group):
    result = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
    result = dist.all_gather_into_tensor(result, x.contiguous(), group=group)
    return result


@planted(LAB, "3.1", r"result is None: .* result of dist\.all_gather assigned\? It writes into the tensor")
def g_assigns_the_all_gather(x, group):
    return operator(assigned, scattered)(x, group)


@planted(LAB, "3.1", r"joined along dimension 1; it should be .* joined along dimension 0: g's forward gathers")
def g_along_the_batch(x, group):
    return gathered_along_the_batch(x, group)


@planted(LAB, "3.1", r"gradient of x is this rank's share of its own part; .* must reduce-scatter once, with SUM")
def g_without_a_sum_in_backward(x, group):
    return operator(gathered, own_part)(x, group)


@planted(LAB, "3.1", r"backward runs 1 all-reduce; expected 1 reduce-scatter")
def g_with_an_all_reduce_in_backward(x, group):
    return operator(gathered, reduced_part)(x, group)


@planted(LAB, "3.1", r"1/t \(here .*\) of this rank's share of the sum .* with SUM")
def g_averages_in_backward(x, group):
    return operator(gathered, averaged_part)(x, group)


@planted(LAB, "3.1", r"share of the largest of the ranks' parts \(MAX\); .*reduce-scatter once, with SUM")
def g_takes_the_largest_in_backward(x, group):
    return operator(gathered, largest_part)(x, group)


@planted(LAB, "3.1", r"the last rank first; .* rank 0's first")
def g_joins_backwards(x, group):
    return operator(gathered_backwards, scattered)(x, group)


@planted(LAB, "3.1", r"interleaved")
def g_deals_in_turn(x, group):
    return operator(dealt_in_turn, scattered)(x, group)


@planted(LAB, "3.1", r"keeps 240 B for backward and needs to keep nothing")
def g_saves_x(x, group):
    return operator(gathered, scattered, lambda ctx, x: ctx.save_for_backward(x))(x, group)


@planted(LAB, "3.1", r"x gets no gradient|no graph")
def g_without_autograd(x, group):
    return gathered(x.detach(), group)


@planted(LAB, "3.1", r"is the sum of the ranks' parts; it should be the ranks' parts joined")
def g_all_reduces(x, group):
    return operator(summed, scattered)(x, group)


@planted(LAB, "3.1", r"deadlock: rank 0 is waiting in all_gather .*; ranks? 1.* ha(s|ve) returned")
def g_on_rank_0_only(x, group):
    return operator(gathered_on_rank_0, scattered)(x, group)


@planted(LAB, "3.1", r"outside group")
def g_of_the_world(x, group):
    return operator(lambda y, _: gathered(y, dist.group.WORLD), lambda y, _: scattered(y, dist.group.WORLD))(x, group)


@planted(LAB, "3.2", r"result is the sum of the ranks' parts; .* leaves this rank's tokens")
def g_bar_all_reduces(x, group):
    return operator(summed, lambda grad, group: grad)(x, group)


@planted(LAB, "3.2", r"this rank's share of its own part; .*reduce-scatter once, with SUM")
def g_bar_only_splits(x, group):
    return operator(own_part, gathered)(x, group)


@planted(LAB, "3.2", r"own part in its place, and zero in the others'; .* needs the gradients of all ranks")
def g_bar_without_a_gather_in_backward(x, group):
    return operator(scattered, in_the_own_place)(x, group)


@planted(LAB, "3.2", r"own part t times, joined .* needs the gradients of all ranks")
def g_bar_repeats_in_backward(x, group):
    return operator(scattered, repeated)(x, group)


@planted(LAB, "3.2", r"forward runs 1 all-reduce; expected 1 reduce-scatter")
def g_bar_reduces_everything(x, group):
    return operator(reduced_part, gathered)(x, group)


@planted(LAB, "3.2", r"1/t \(here .*\) of this rank's share of the sum .* with SUM")
def g_bar_averages(x, group):
    return operator(averaged_part, gathered)(x, group)


@planted(LAB, "3.2", r"gradient of another shape")
def g_bar_returns_a_part_in_backward(x, group):
    return operator(scattered, lambda grad, group: averaged(grad, group))(x, group)


@planted(
    LAB, "3.3", r"the gradients are not: g gives in backward this rank's share of its own part; .*reduce-scatter once"
)
def linear_with_a_split_in_backward(x, weight, bias, group):
    return F.linear(operator(gathered, own_part)(x, group), weight, bias)


def shard_keeping(backward_x=None, scatter=scattered, save_full=False, on_ctx=False, bias_rows=None):
    """A shard-keeping linear with a fault in it."""

    class Linear(Function):
        @staticmethod
        def forward(ctx, x, weight, bias, group):
            full = gathered(x, group)
            ctx.group = group
            ctx.save_for_backward(full if save_full else x, weight)
            if on_ctx:
                ctx.full = full
            return F.linear(full, weight, bias)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            grad_x = scatter(grad @ weight, ctx.group)
            full = ctx.full if on_ctx else x if save_full else gathered(x, ctx.group)
            rows = grad
            if backward_x is not None:
                full, rows = backward_x(x, grad, ctx.group)
            return (
                grad_x,
                rows.flatten(0, 1).t() @ full.flatten(0, 1),
                (bias_rows or (lambda g, _: g))(grad, ctx.group).sum((0, 1)),
                None,
            )

    return Linear.apply


@planted(
    LAB, "3.5", r"keeps (576|1,152) B for backward where 288 B are enough \(x, this rank's tokens\): save the shard"
)
def keeps_the_gathered_input(x, weight, bias, group):
    return shard_keeping(save_full=True)(x, weight, bias, group)


@planted(LAB, "3.5", r"where 288 B are enough")
def gathers_and_leaves_it_to_autograd(x, weight, bias, group):
    return F.linear(g(x, group), weight, bias)


@planted(LAB, "3.5", r"no hook can see them")
def hides_the_gathered_input_on_ctx(x, weight, bias, group):
    return shard_keeping(on_ctx=True)(x, weight, bias, group)


@planted(LAB, "3.5", r"backward runs 1 all-gather, 1 all-reduce; expected 1 all-gather, 1 reduce-scatter")
def input_gradient_all_reduced(x, weight, bias, group):
    return shard_keeping(scatter=reduced_part)(x, weight, bias, group)


@planted(LAB, "3.3", r"gradient of bias is the sum of the ranks' parts; .* each rank's bias is its own")
def linear_with_a_summed_bias(x, weight, bias, group):
    return F.linear(g(x, group), weight) + operator(lambda y, _: y.view_as(y), summed)(bias, group)


@planted(LAB, "3.2", r"result is the sum of the ranks' parts; .* leaves this rank's tokens")
def g_bar_by_torchs_differentiable_all_reduce(x, group):
    return differentiable.all_reduce(x.clone(), group=group)
