"""Our training step, on which lab 6's are judged, takes the unsharded model's step."""

import pytest
import torch

from actmem.formulas.activations import TABLE2
from actmem.parallel.linear import shard
from actmem_course.judge.cases.lab6_train import mode_named, random_microbatches, small_shape
from actmem_course.judge.compare import close
from actmem_course.judge.solutions.lab6_train import make_model, training_step
from actmem_course.judge.virtual import VirtualRanks
from actmem_course.judge.workbench import Bench
from tests.tiers import at_night


def parameters_that_move_otherwise(b, mode, max_norm):
    """Those in which our step and one of the whole model, whose gradient is clipped, differ."""
    model, dense = (make_model(small_shape(b), row, b.group, dtype=torch.float64) for row in (mode, TABLE2[0]))
    before, microbatches = [p.detach().clone() for p in model.parameters()], random_microbatches(b, 1)
    training_step(model, torch.optim.SGD(model.parameters(), lr=1.0), microbatches, max_norm)
    for tokens, targets in microbatches:
        (dense.loss(dense(tokens), targets) / len(microbatches)).backward()
    scale = min(1.0, max_norm / torch.stack([p.grad.norm() for p in dense.parameters()]).norm().item())
    cuts = [getattr(p, "partition_dim", None) for p in model.parameters()]
    right = [shard(scale * p.grad, cut, model.tp) for p, cut in zip(dense.parameters(), cuts)]
    moved = [old - p.detach() for old, p in zip(before, model.parameters())]
    return [k for k, (a, b) in enumerate(zip(moved, right)) if not close(a / scale, b / scale)]


@pytest.mark.parametrize("size", [at_night(2), 4])
def test_our_step_is_the_unsharded_models(size):
    for mode, max_norm in [*((mode, 1e-3) for mode in TABLE2), (mode_named("tensor+sequence"), 1e9)]:

        def job(rank, mode=mode, max_norm=max_norm):
            return parameters_that_move_otherwise(Bench({}, rank), mode, max_norm)

        assert VirtualRanks(size).run(job) == [[]] * size
