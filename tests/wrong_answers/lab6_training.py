"""Wrong answers to lab 6: the training."""

import torch

from actmem.formulas.activations import TABLE2
from actmem_course.judge.solutions import lab6_train as right
from actmem_course.judge.solutions.lab6_train import MAX_NORM, NUM_MICROBATCHES
from tests.wrong_answers.planted import planted

LAB = "lab6_train"


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
