"""Wrong answers to lab 2: the operators f and f_bar."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch.autograd import Function

from tests.wrong_answers.planted import planted

LAB = "lab2_tensor_parallel"


def operator(forward, backward, save=None):
    """A learner's operator from what its two passes do to a tensor."""

    class Operator(Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            if save:
                save(ctx, x)
            return forward(x, group)

        @staticmethod
        def backward(ctx, grad):
            return backward(grad, ctx.group), None

    return Operator.apply


def same(x, group):
    return x.view_as(x)


def summed(x, group):
    y = x.clone()
    dist.all_reduce(y, group=group)
    return y


def in_place(x, group):
    dist.all_reduce(x, group=group)
    return x


def world(x, group):
    y = x.clone()
    dist.all_reduce(y)
    return y


def averaged(x, group):
    return summed(x, group) / dist.get_world_size(group)


def twice(x, group):
    return summed(summed(x, group), group)


def largest(x, group):
    y = x.clone()
    dist.all_reduce(y, dist.ReduceOp.MAX, group=group)
    return y


def divided(x, group):
    return x / dist.get_world_size(group)


def only_rank_0(x, group):
    return summed(x, group) if dist.get_rank(group) == 0 else x


def gather_and_add(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return sum(parts)


def mismatched(x, group):
    if dist.get_rank(group) == 0:
        return summed(x, group)
    return gather_and_add(x, group)


@planted(
    LAB,
    "2.1",
    r"gradient of x is this rank's own part; it should be the sum of the ranks' parts: f's backward must all-reduce",
)
def f_without_all_reduce(x, group):
    return x


def assigned(x, group):
    y = x.clone()
    y = dist.all_reduce(y, group=group)
    return y


@planted(
    LAB,
    "2.1",
    r"x gets no gradient: .*result of dist\.all_reduce assigned\? It writes into the tensor .* and returns None",
)
def f_assigns_the_all_reduce(x, group):
    return operator(same, assigned)(x, group)


@planted(
    LAB,
    "2.2",
    r"result is None: is a return missing, or was the result of dist\.all_reduce assigned\? It writes into the tensor",
)
def f_bar_assigns_the_all_reduce(x, group):
    return operator(assigned, same)(x, group)


@planted(LAB, "2.1", r"result is the sum of the ranks' parts; .*f's forward must return x as it is")
def f_and_f_bar_swapped(x, group):
    return operator(summed, same)(x, group)


@planted(LAB, "2.1", r"gradient of x is t \(here .*\) times the sum .* must all-reduce once")
def f_all_reduces_twice(x, group):
    return operator(same, twice)(x, group)


@planted(LAB, "2.1", r"1/t \(here 1/.*\) of the sum .* with SUM")
def f_averages(x, group):
    return operator(same, averaged)(x, group)


@planted(LAB, "2.1", r"1/t \(here 1/.*\) of this rank's own part; .* must all-reduce once, with SUM")
def f_divides(x, group):
    return operator(same, divided)(x, group)


@planted(LAB, "2.1", r"the largest of the ranks' parts \(MAX\); .* must all-reduce once, with SUM")
def f_takes_the_largest(x, group):
    return operator(same, largest)(x, group)


@planted(LAB, "2.1", r"gradient that backward is given is changed in place")
def f_all_reduces_in_place(x, group):
    return operator(same, in_place)(x, group)


@planted(LAB, "2.1", r"keeps 480 B for backward and needs to keep nothing")
def f_saves_x(x, group):
    return operator(same, summed, lambda ctx, x: ctx.save_for_backward(x))(x, group)


@planted(LAB, "2.1", r"no hook can see them \(a tensor as an attribute of ctx")
def f_hides_x_on_ctx(x, group):
    return operator(same, summed, lambda ctx, x: setattr(ctx, "x", x.clone()))(x, group)


@planted(LAB, "2.1", r"outside group: pass group=group")
def f_ignores_its_group(x, group):
    return operator(same, world)(x, group)


@planted(LAB, "2.1", r"backward runs 1 all-gather; expected 1 all-reduce")
def f_gathers_and_adds(x, group):
    return operator(same, gather_and_add)(x, group)


@planted(
    LAB,
    "2.1",
    r"deadlock: rank 0 is waiting in all_reduce \(lab2_operators.py:\d+\); ranks? 1(, 2, 3)? ha(s|ve) returned",
)
def f_reduces_on_rank_0_only(x, group):
    return operator(same, only_rank_0)(x, group)


@planted(LAB, "2.1", r"deadlock: rank 0 is waiting in all_reduce \(.*\); ranks 1, 2, 3 have returned", size=4)
def f_reduces_on_rank_0_of_four(x, group):
    return operator(same, only_rank_0)(x, group)


@planted(LAB, "2.1", r"result is None: is a return missing")
def f_returns_nothing(x, group):
    operator(same, summed)(x, group)


@planted(LAB, "2.1", r"one gradient for each argument of forward")
def f_returns_one_gradient(x, group):
    class F(Function):
        @staticmethod
        def forward(ctx, x, group):
            ctx.group = group
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            return summed(grad, ctx.group)

    return F.apply(x, group)


@planted(LAB, "2.1", r"no graph")
def f_detaches(x, group):
    return x.detach()


@planted(LAB, "2.2", r"result is this rank's own part; .* f_bar's forward must all-reduce")
def f_bar_without_all_reduce(x, group):
    return operator(same, same)(x, group)


@planted(LAB, "2.2", r"is the sum of the ranks' parts; .* backward must pass .* without an all-reduce")
def f_bar_by_torchs_differentiable_all_reduce(x, group):
    return differentiable.all_reduce(x.clone(), group=group)


@planted(LAB, "2.2", r"x is changed in place")
def f_bar_in_place(x, group):
    return operator(in_place, same)(x, group)


@planted(LAB, "2.2", r"1/t \(here 1/.*\) of the sum .* f_bar's forward must all-reduce once, with SUM")
def f_bar_averages(x, group):
    return operator(averaged, same)(x, group)


@planted(
    LAB, "2.2", r"1/t \(here 1/.*\) of this rank's own part; .* f_bar's backward must pass the gradient on unchanged"
)
def f_bar_divides_in_backward(x, group):
    return operator(summed, divided)(x, group)


@planted(LAB, "2.2", r"result is t \(here .*\) times the sum .* forward must all-reduce once")
def f_bar_sums_twice(x, group):
    return operator(twice, same)(x, group)


@planted(
    LAB,
    "2.2",
    r"rank 0 is waiting in all_reduce .*; ranks? 1.* (is|are) waiting in all_gather \(lab2_operators.py:\d+\)",
)
def f_bar_mismatched(x, group):
    return operator(mismatched, same)(x, group)


@planted(LAB, "2.2", r"no graph")
def f_bar_under_no_grad(x, group):
    with torch.no_grad():
        return summed(x, group)


@planted(LAB, "2.2", r"tensors that do not fit: rank 0 hands it 60 elements of float64; rank 1 hands it 12 elements")
def f_bar_of_a_part_on_rank_1(x, group):
    part = x if dist.get_rank(group) == 0 else x[:, :, :1]
    return operator(summed, same)(part, group)
