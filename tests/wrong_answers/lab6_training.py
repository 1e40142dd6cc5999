"""Wrong answers to lab 6's training: steps, cuts, loss curves."""

import torch
import torch.distributed as dist

from actmem.formulas.activations import TABLE2
from actmem.parallel.linear import reduce_partial_gradients
from actmem_course.judge.solutions import lab6_train as right
from actmem_course.judge.solutions.lab6_train import MAX_NORM, NUM_MICROBATCHES
from tests.wrong_answers.planted import planted

LAB = "lab6_train"


def stepped(
    model, optimizer, microbatches, max_norm, *, clear=True, divide=True, reduce=True, clip=None, step=True, result=None
):
    """Our training_step, with one thing in it changed."""
    if clear:
        optimizer.zero_grad()
    losses = []
    for tokens, targets in microbatches:
        loss = model.loss(model(tokens), targets)
        (loss / len(microbatches) if divide else loss).backward()
        losses.append(loss.item())
        if reduce == "each":
            reduce_partial_gradients(model, model.tp)
    if reduce == "last":
        (clip or clipped)(model, max_norm)
    if reduce:
        reduce_partial_gradients(model, model.tp)
    if reduce != "last":
        (clip or clipped)(model, max_norm)
    if step:
        optimizer.step()
    return (result or (lambda losses: sum(losses) / len(losses)))(losses)


def clipped(model, max_norm):
    norm = right.gradient_norm(model)
    if norm > max_norm:
        for parameter in model.parameters():
            parameter.grad *= max_norm / norm


@planted(LAB, "6.4", r"reduce_partial_gradients sums their gradients over the ranks, once")
def no_reduction(*arguments):
    return stepped(*arguments, reduce=False)


@planted(LAB, "6.4", r"reduce_partial_gradients sums their gradients over the ranks, once, after the last backward")
def a_reduction_for_each_microbatch(*arguments):
    return stepped(*arguments, reduce="each")


@planted(LAB, "6.4", r"with a norm above max_norm: .*norm of the whole, complete gradient")
def clipped_before_the_reduction(*arguments):
    return stepped(*arguments, reduce="last")


@planted(LAB, "6.4", r"steps are 3 times too long: the loss is the mean over the 3 microbatches")
def sum_of_the_microbatches(*arguments):
    return stepped(*arguments, divide=False)


@planted(
    LAB, "6.4", r"steps are 1/3 of what they should be: the losses are divided by the number of microbatches twice"
)
def divided_twice(model, optimizer, microbatches, max_norm):
    def again(model, max_norm):
        for parameter in model.parameters():
            parameter.grad /= len(microbatches)
        clipped(model, max_norm)

    return stepped(model, optimizer, microbatches, max_norm, clip=again)


@planted(LAB, "6.4", r"step 2: the gradients of the step before are still there: optimizer.zero_grad\(\) is missing")
def never_cleared(*arguments):
    return stepped(*arguments, clear=False)


@planted(LAB, "6.4", r"only the last microbatch counts: zero_grad belongs before the first")
def cleared_for_each_microbatch(model, optimizer, microbatches, max_norm):
    losses = []
    for tokens, targets in microbatches:
        optimizer.zero_grad()
        loss = model.loss(model(tokens), targets) / len(microbatches)
        loss.backward()
        losses.append(loss.item())
    reduce_partial_gradients(model, model.tp)
    clipped(model, max_norm)
    optimizer.step()
    return sum(losses)


@planted(LAB, "6.4", r"no parameter has changed: is optimizer.step\(\) missing\?")
def no_step(*arguments):
    return stepped(*arguments, step=False)


@planted(LAB, "6.4", r"with a norm above max_norm: gradients are not scaled down to max_norm")
def never_clipped(*arguments):
    return stepped(*arguments, clip=lambda model, max_norm: None)


@planted(LAB, "6.4", r"gradients are scaled by the norm of this rank's parameters, so ranks scale differently")
def clipped_by_each_rank(*arguments):
    return stepped(
        *arguments, clip=lambda model, max_norm: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    )


@planted(LAB, "6.4", r"each element of a gradient is clipped to max_norm by itself")
def clipped_by_value(*arguments):
    return stepped(
        *arguments, clip=lambda model, max_norm: torch.nn.utils.clip_grad_value_(model.parameters(), max_norm)
    )


@planted(LAB, "6.4", r"each parameter's gradient is scaled by its own norm")
def clipped_one_by_one(*arguments):
    def each(model, max_norm):
        for parameter in model.parameters():
            torch.nn.utils.clip_grad_norm_([parameter], max_norm)

    return stepped(*arguments, clip=each)


@planted(LAB, "6.4", r"gradients are scaled up to max_norm")
def scaled_always(*arguments):
    def always(model, max_norm):
        norm = right.gradient_norm(model)
        for parameter in model.parameters():
            parameter.grad *= max_norm / norm

    return stepped(*arguments, clip=always)


@planted(LAB, "6.4", r"gradients of parameters that are cut are added up over the ranks")
def gradients_as_in_data_parallelism(*arguments):
    def average(model, max_norm):
        for parameter in model.parameters():
            if model.tp.size > 1:
                dist.all_reduce(parameter.grad, group=model.tp.group)
                parameter.grad /= model.tp.size
        clipped(model, max_norm)

    return stepped(*arguments, clip=average)


@planted(LAB, "6.4", r"the parameters are right, but the result is the sum of the 3 microbatches' losses")
def loss_summed(*arguments):
    return stepped(*arguments, result=sum)


@planted(LAB, "6.4", r"the parameters are right, but the result is the last microbatch's loss")
def loss_of_the_last(*arguments):
    return stepped(*arguments, result=lambda losses: losses[-1])


def trained(
    shape, mode, text, num_steps, group, factory, *, optimizer=None, step_of=lambda step: step, parts=NUM_MICROBATCHES
):
    """Our train, with one thing in it changed."""
    model = right.make_model(shape, mode, group, **factory)
    optimizer = (optimizer or (lambda parameters: torch.optim.AdamW(parameters, lr=right.LEARNING_RATE)))(
        model.parameters()
    )
    losses = []
    for step in range(num_steps):
        tokens, targets = right.batch(text, step_of(step), shape.seq_length, NUM_MICROBATCHES * shape.micro_batch_size)
        losses.append(
            right.training_step(model, optimizer, list(zip(tokens.chunk(parts), targets.chunk(parts))), MAX_NORM)
        )
    return losses


@planted(LAB, "6.5", r"mode 'tensor': the trained model is in another mode")
def trains_one_mode_only(shape, mode, text, num_steps, group, **factory):
    return trained(shape, TABLE2[0], text, num_steps, group, factory)


@planted(LAB, "6.5", r"two steps train on the same batch")
def trains_on_one_batch(shape, mode, text, num_steps, group, **factory):
    return trained(shape, mode, text, num_steps, group, factory, step_of=lambda step: 0)


@planted(LAB, "6.5", r"the optimizer is SGD; expected torch.optim.AdamW")
def another_optimizer(shape, mode, text, num_steps, group, **factory):
    return trained(
        shape, mode, text, num_steps, group, factory, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    )


@planted(LAB, "6.5", r"the learning rate is 0.001; expected lr=LEARNING_RATE")
def learning_rate_of_the_default(shape, mode, text, num_steps, group, **factory):
    return trained(shape, mode, text, num_steps, group, factory, optimizer=torch.optim.AdamW)


@planted(
    LAB,
    "6.5",
    r"a step runs microbatches of 4 sequences; expected NUM_MICROBATCHES \(2\) of shape.micro_batch_size \(2\)",
)
def one_large_microbatch(shape, mode, text, num_steps, group, **factory):
    return trained(shape, mode, text, num_steps, group, factory, parts=1)


@planted(LAB, "6.5", r"expected 5 losses, one per step, got 1")
def the_last_loss_only(shape, mode, text, num_steps, group, **factory):
    return trained(shape, mode, text, num_steps, group, factory)[-1:]


@planted(LAB, "6.5", r"a new optimizer in every step forgets AdamW's averages")
def a_new_optimizer_each_step(shape, mode, text, num_steps, group, **factory):
    model = right.make_model(shape, mode, group, **factory)
    losses = []
    for step in range(num_steps):
        optimizer = torch.optim.AdamW(model.parameters(), lr=right.LEARNING_RATE)
        tokens, targets = right.batch(text, step, shape.seq_length, NUM_MICROBATCHES * shape.micro_batch_size)
        microbatches = list(zip(tokens.chunk(NUM_MICROBATCHES), targets.chunk(NUM_MICROBATCHES)))
        losses.append(right.training_step(model, optimizer, microbatches, MAX_NORM))
    return losses


@planted(
    LAB,
    "6.5",
    r"the losses of mode 'tensor' differ from those of mode 'none' from step 1 on, so the models or the batches differ",
)
def another_seed_where_it_is_shared(shape, mode, text, num_steps, group, **factory):
    return trained(shape, mode, text, num_steps, group, factory, step_of=lambda step: step + 100 * mode.tensor_parallel)
