"""The named steps that lab 6's training step is judged by take the unsharded model's step."""

from itertools import product

import torch

from actmem.formulas.activations import TABLE2
from actmem.parallel.linear import shard
from actmem_course.judge.compare import close
from actmem_course.judge.lab_checks.lab6_model import mode_named, small_shape
from actmem_course.judge.lab_checks.lab6_step import random_microbatches, training_start
from actmem_course.judge.lab_checks.lab6_training import take_training_steps, training_mistakes, training_program
from actmem_course.judge.solutions.lab6_train import make_model
from tests.labs.judged import real_bench


def parameters_that_move_otherwise(name, max_norm):
    """Those in which the program and one whole model, whose gradient is clipped, take another step."""
    b = real_bench({"__file__": ""})
    model, dense = (
        make_model(small_shape(b), mode_named(mode), b.group, dtype=torch.float64) for mode in (name, "none")
    )
    microbatches = random_microbatches(b, 1)
    start, _ = training_start(b, model, microbatches, max_norm, [])
    moved = take_training_steps(training_program(len(microbatches)), start).moved[b.rank]
    for tokens, targets in microbatches:
        (dense.loss(dense(tokens), targets) / len(microbatches)).backward()
    scale = min(1.0, max_norm / torch.stack([p.grad.norm() for p in dense.parameters()]).norm().item())
    cuts = {name: getattr(p, "partition_dim", None) for name, p in model.named_parameters()}
    right = {name: shard(scale * p.grad, cuts[name], model.tp) for name, p in dense.named_parameters()}
    return [name for name in right if not close(moved[name] / scale, right[name] / scale)]


def test_the_program_takes_the_unsharded_models_step(pools):
    for size, mode, max_norm in product((2, 4), TABLE2, (1e9, 1e-3)):
        assert pools[size].run(parameters_that_move_otherwise, mode.name, max_norm) == [[]] * size


def test_every_mistake_has_words_of_its_own_step():
    mistakes = [diagnosis for diagnosis, _ in training_mistakes(3, 2)]
    names = [step.name for step in training_program(3)]
    assert len(names) == 8 and len(mistakes) > 60
    for name in names:
        for change in ("is missing", "comes twice"):
            assert any(words.startswith(f"{name} {change}") for words in mistakes)
