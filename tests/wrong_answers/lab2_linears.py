"""Wrong answers to lab 2: the linears."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
import torch.nn.functional as F

from actmem_course.judge.solutions.lab2_tensor_parallel import f, f_bar
from tests.wrong_answers.planted import planted

LAB = "lab2_tensor_parallel"


@planted(LAB, "2.3", r"the ranks' parts joined along dimension 2; .*return this rank's own output features")
def column_gathers_its_output(x, weight, bias, group):
    return torch.cat(differentiable.all_gather(F.linear(f(x, group), weight, bias), group=group), -1)


@planted(
    LAB, "2.3", r"is the sum of the ranks' parts; .* different features on every rank, so there is nothing to add up"
)
def column_sums_its_output(x, weight, bias, group):
    return f_bar(F.linear(f(x, group), weight, bias), group)


@planted(LAB, "2.3", r"gradient of weight is the sum of the ranks' parts; .* each rank's weight is its own")
def column_with_f_on_the_weight(x, weight, bias, group):
    return F.linear(f(x, group), f(weight, group), bias)


@planted(LAB, "2.3", r"keeps 1,\d+ B for backward where 576 B are enough")
def column_keeps_a_second_copy(x, weight, bias, group):
    y = f(x, group)
    return F.linear(y.clone(), weight, bias) + 0 * (y * y).sum()


@planted(
    LAB,
    "2.4",
    r"gradient of bias is t \(here .*\) times what it should be: every rank has the whole gradient of bias already",
)
def row_with_f_on_the_bias(x, weight, bias, group):
    return f_bar(F.linear(x, weight), group) + f(bias, group)


ON_RANK_0 = (
    r"^the forward is right, but bias is used on rank 0 only: .* drift apart\. Add it on every rank, after the sum"
)


@planted(LAB, "2.4", ON_RANK_0)
def row_with_bias_on_rank_0(x, weight, bias, group):
    return f_bar(F.linear(x, weight, bias if dist.get_rank(group) == 0 else None), group)


@planted(LAB, "2.4", ON_RANK_0)
def row_with_bias_times_0_on_the_others(x, weight, bias, group):
    return f_bar(F.linear(x, weight, bias * (dist.get_rank(group) == 0)), group)
