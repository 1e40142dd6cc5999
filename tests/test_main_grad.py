"""float32 main gradients: small steps add up, the bytes of the bill, complete on all ranks."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from actmem.config import ConfigError, ModelShape
from actmem.formulas.states import state_rows
from actmem.layers.gpt import GPT
from actmem.main_grad import MainWeights, gradient_of, use_main_gradients
from actmem.parallel.groups import tensor_parallel
from actmem.parallel.linear import load_dense, reduce_partial_gradients
from actmem.rows import by_term
from tests import test_pipeline
from tests.gradients import gradient_pairs, largest_difference, part_of_state
from tests.test_pipeline import dense_step, pipeline_of

SHAPE = ModelShape(8, 2, 24, 4, num_layers=2, vocab_size=32)
IDS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))


def train(model, optimizer_of, steps=1):
    weights = MainWeights(model)
    optimizer = optimizer_of(weights.parameters())
    for _ in range(steps):
        for _ in range(2):
            (model.loss(model(IDS), IDS) / 2).backward()
        weights.step(optimizer)
    return weights, optimizer


def bytes_of(tensors):
    """By dtype, each storage once."""
    storages = {x.untyped_storage().data_ptr(): (x.dtype, x.untyped_storage().nbytes()) for x in tensors}
    return {dtype: sum(n for d, n in storages.values() if d is dtype) for dtype, _ in storages.values()}


def test_bytes_of_a_whole_training_state_are_the_bills():
    model: Any = GPT(SHAPE, dtype=torch.bfloat16)
    weights, optimizer = train(model, torch.optim.AdamW)
    moments = [x for state in optimizer.state.values() for x in (state["exp_avg"], state["exp_avg_sq"])]
    gradients = [x for parameter in model.parameters() for x in (parameter.grad, parameter.main_grad) if x is not None]
    held = bytes_of([*model.parameters(), *gradients, *weights.parameters(), *moments])
    assert len(weights.parameters()) == len(list(model.parameters()))
    assert sum(held.values()) == sum(by_term(state_rows(SHAPE)).values())


def test_small_steps_add_up_in_the_main_weights():
    model: Any = GPT(SHAPE, p=0.0, dtype=torch.bfloat16)
    before = model.layers["0"].norm1.weight.detach().clone()
    weights, _ = train(model, lambda parameters: torch.optim.SGD(parameters, lr=1e-5), steps=2)
    assert torch.equal(model.layers["0"].norm1.weight, before)  # 1 + 1e-5 is 1 in bfloat16
    main = next(m for p, m in zip(model.parameters(), weights.parameters()) if p is model.layers["0"].norm1.weight)
    assert main.dtype is torch.float32 and not torch.equal(main, before.float())
    assert all(not gradient_of(parameter).any() for parameter in model.parameters())


def step_of_sgd(model, weights):
    model.loss(model(IDS), IDS).backward()
    weights.step(torch.optim.SGD(weights.parameters(), lr=0.1))
    return [*model.parameters()]


def test_a_state_loaded_later_is_stepped_from_and_the_same_values_lose_no_small_step():
    state = GPT(SHAPE, p=0.0, seed=7, dtype=torch.bfloat16).state_dict()
    late, early = (GPT(SHAPE, p=0.0, dtype=torch.bfloat16) for _ in range(2))
    early.load_state_dict(state)
    weights = [MainWeights(model) for model in (late, early)]
    late.load_state_dict(state)
    assert all(map(torch.equal, *(step_of_sgd(*pair) for pair in zip((late, early), weights))))
    late.load_state_dict(early.state_dict())  # the values that it has
    for pair in zip((late, early), weights):
        step_of_sgd(*pair)
    assert all(map(torch.equal, *(one.parameters() for one in weights)))


def test_weights_of_parameters_that_are_gone_are_refused():
    model = GPT(SHAPE, p=0.0)
    weights = MainWeights(model)
    model.load_state_dict(GPT(SHAPE).state_dict(), assign=True)
    with pytest.raises(ConfigError, match="^module: has other parameters than when its MainWeights was made"):
        step_of_sgd(model, weights)


def step_of_copies(wrap):
    model = GPT(SHAPE, p=0.0)
    weights = MainWeights(model)
    module = wrap(model)
    model.loss(module(IDS), IDS).backward()
    try:
        weights.step(torch.optim.SGD(weights.parameters(), lr=0.1))
    except ConfigError as error:
        return str(error)


def test_gradients_that_a_wrapper_has_reduced_are_not_passed_over(pools):
    """It puts the mean in ``.grad`` after backward, where ``main_grad`` has this rank's own: the copies drift apart."""
    message = "module: has gradients in .grad, which .main_grad lacks: reduce .main_grad"
    assert pools[2].run(step_of_copies, DistributedDataParallel) == [message] * 2


def test_zero_grad_of_the_weights_discards_and_the_optimizer_s_changes_nothing():
    model: Any = nn.Linear(2, 2, bias=False, dtype=torch.bfloat16)
    weights = MainWeights(model)
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    for value in (1000.0, 1.0):
        weights.zero_grad()
        model(torch.full((1, 2), value, dtype=torch.bfloat16)).sum().backward()
    optimizer.zero_grad()
    assert gradient_of(model.weight).tolist() == [[1.0] * 2] * 2
    expected = weights.parameters()[0].detach() - 0.1
    weights.step(optimizer)
    assert torch.equal(weights.parameters()[0], expected) and not gradient_of(model.weight).any()


def test_frozen_parameters_have_no_main_gradient_and_asking_twice_adds_once():
    model: Any = nn.Linear(3, 3, dtype=torch.bfloat16)
    model.bias.requires_grad_(False)
    use_main_gradients(model)
    use_main_gradients(model)
    model(torch.ones(1, 3, dtype=torch.bfloat16)).sum().backward()
    assert gradient_of(model.weight).tolist() == [[1.0] * 3] * 3
    assert gradient_of(model.bias) is None and len(MainWeights(model).parameters()) == 1


def norm_of(parameters, tp):
    """The 2-norm of the whole model's gradient, from this rank's shards."""
    squares: list[Any] = [0.0, 0.0]
    for parameter in parameters:
        squares[hasattr(parameter, "partition_dim")] += gradient_of(parameter).double().square().sum()
    cut = squares[True].clone()
    dist.all_reduce(cut, group=tp.group)
    return math.sqrt(squares[False] + cut)


def largest_error_of_two_ranks():
    dense, tokens, targets, _ = dense_step(2)
    tp = tensor_parallel(sequence_parallel=True)
    model = GPT(test_pipeline.SHAPE, tp, p=0.0, dtype=torch.float64)
    load_dense(model, dense.state_dict(), tp)
    weights = MainWeights(model)
    for x, y in zip(tokens.chunk(2), targets.chunk(2)):
        (model.loss(model(x), y) / 2).backward()
    reduce_partial_gradients(model, tp)
    norms = norm_of(model.parameters(), tp), norm_of(weights.parameters(), tp)
    true = math.sqrt(sum(gradient_of(parameter).square().sum().item() for parameter in dense.parameters()))
    return max(largest_difference(gradient_pairs(model, dense, tp)), *(abs(norm - true) for norm in norms))


def test_partial_gradients_and_norms_under_sequence_parallelism(pools):
    assert max(pools[2].run(largest_error_of_two_ranks)) < 1e-12


def largest_error_of_a_pipeline():
    dense, tokens, targets, _ = dense_step(4)
    pipeline = pipeline_of((2, 1, 1, 4), p=0.0, dtype=torch.float64)
    for part in pipeline.parts:
        load_dense(part, part_of_state(dense, part), pipeline.tp)
        use_main_gradients(part)
    pipeline.step(tokens, targets)
    assert all(parameter.grad is None for part in pipeline.parts for parameter in part.parameters())
    return max(largest_difference(gradient_pairs(part, dense, pipeline.tp)) for part in pipeline.parts)


def test_a_pipeline_scales_and_shares_them(pools):
    assert max(pools[2].run(largest_error_of_a_pipeline)) < 1e-12
