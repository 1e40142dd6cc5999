"""The bill at the peak adds up to the peak, and the peak is the one that others count."""

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.checkpoint import checkpoint

from actmem.config import ConfigError, ModelShape
from actmem.layers.gpt import GPT
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.modes import nodes_from
from actmem.ledger.recorder import record
from actmem.ledger.storages import StorageLifetimes
from actmem.ledger.whole_step import loss_of, step, watch_step
from actmem.parallel.groups import tensor_parallel
from actmem.recipes import RECOMPUTE_MODES
from actmem.torch_private import fake_tensors, receive_buffers_of
from tests.measure.corner_cases import Run, x
from tests.measure.live_count import existing, most_alive, one_step
from tests.tiers import covering

SHAPE = ModelShape(16, 2, 32, 4, num_layers=2, vocab_size=64)


def layer(recompute, dtype=torch.float32):
    return TransformerLayer(SHAPE, recompute=recompute, dtype=dtype, seed=1)


def gpt():
    return GPT(SHAPE, dtype=torch.float32)


def copied_layers():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2)


MODELS: dict[str, tuple] = {
    **{
        mode: (partial(layer, mode), lambda: torch.randn(16, 2, 32, requires_grad=True), loss_of)
        for mode in RECOMPUTE_MODES
    },
    "gpt": (gpt, lambda: torch.zeros(2, 16, dtype=torch.int64), loss_of),
    "linear": (lambda: nn.Linear(8, 8), lambda: torch.ones(4, 8), lambda y: y.square().mean()),
    "encoder": (copied_layers, lambda: torch.ones(4, 2, 8), loss_of),
}


def assert_bill_is_the_count(model, batch, loss):
    optimizer = torch.optim.AdamW(model.parameters())
    one_step(model, batch, loss, optimizer)
    bill = step(model, batch, loss, optimizer)
    again = partial(one_step, model, batch, loss, optimizer)
    assert sum(row.bytes for row in bill.peak) == bill.peak_bytes == max(bill.curve)
    assert bill.peak_bytes == most_alive(again, existing(model, batch, optimizer))
    assert sum(bill.by_kind().values()) == bill.peak_bytes
    weights = sum(p.untyped_storage().nbytes() for p in model.parameters())
    assert bill.by_kind()["weight"] == weights and bill.by_kind()["optimizer state"] >= 2 * weights
    return bill


@pytest.mark.parametrize("name", MODELS)
def test_the_bill_adds_up_to_the_independent_peak_real_and_fake(name):
    make, inputs, loss = MODELS[name]
    real = assert_bill_is_the_count(make(), inputs(), loss)
    with emulated_rank(1):
        model, batch = make(), inputs()
        optimizer = torch.optim.AdamW(model.parameters())
        one_step(model, batch, loss, optimizer)
        assert step(model, batch, loss, optimizer).by_kind() == real.by_kind()


class _Keeps(torch.autograd.Function):
    """Its backward has a sum of its own, and holds what it returns."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.kept = kept
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.kept.append(grad.neg() + grad.neg())
        return ctx.kept[-1], None


class _WithGaps(torch.autograd.Function):
    """Its gradient lies in memory with gaps."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return torch.empty_strided(grad.shape, (2 * grad.shape[1], 1)).copy_(grad)


def goes_to_two(m, y):
    """The sum's gradient waits for exp when that of neg comes."""
    read_last = y.exp()
    read_first = y.neg()
    return (y + read_last).sin().sum() + read_first.sum()


READERS: dict[str, list] = {
    "each makes a gradient": [lambda m, y: y.neg().sum()] * 6,
    "the first is held": [
        lambda m, y: y.neg().sum(),
        lambda m, y: _Keeps.apply(y, m.__dict__.setdefault("kept", [])).sum(),
    ],
    "the first is held by another sum": [goes_to_two],
    "the first is no tensor of its own": [lambda m, y: y.neg().sum(), lambda m, y: y.sum()],
    "the first has gaps": [lambda m, y: y.neg().sum(), lambda m, y: _WithGaps.apply(y).sum()],
    "two of one operation": [lambda m, y: y.neg().sum(), lambda m, y: (y * y).sum()],
    "of another layout": [lambda m, y: y.t().neg().sum(), lambda m, y: y.t().exp().sum()],
    "none, but C++ adds in forward without autograd": [
        lambda m, y: torch.no_grad()(nn.functional.poisson_nll_loss)(y, torch.ones_like(y), full=True) + y.sum()
    ],
    "a node has sums of its own": [lambda m, y: torch.linalg.svd(y, full_matrices=False)[0].sum()],
    # Nodes that write into a tensor of their own, though not under a mode.
    "rows by number": [lambda m, y: y[torch.arange(0, 640, 2)].sin().sum()],
    "rows selected": [lambda m, y: y.index_select(0, torch.arange(0, 640, 2)).sin().sum()],
    "the largest": [lambda m, y: y.topk(2).values.sin().sum() + y.max(1).values.sum()],
    "gathered": [lambda m, y: y.gather(1, torch.zeros(640, 4, dtype=torch.int64)).sin().sum()],
    "labels of several classes": [lambda m, y: bce(y, torch.ones_like(y), pos_weight=torch.ones(64))],
}


@pytest.mark.parametrize("case", READERS)
def test_gradients_of_one_tensor_add_up_where_a_step_without_a_mode_adds_them(case):
    def made():
        torch.manual_seed(0)
        model = Run(
            lambda m, x: sum(read(m, y) for y in [m.linear(x)] for read in READERS[case]), linear=nn.Linear(64, 64)
        )
        return model, torch.randn(640, 64, requires_grad=True)

    (model, batch), (plain, same) = made(), made()
    most = most_alive(lambda: one_step(plain, same, torch.sum, None), existing(plain, same, None))
    assert step(model, batch, torch.sum).peak_bytes == most and torch.equal(batch.grad, same.grad)
    assert all(torch.equal(one.grad, other.grad) for one, other in zip(model.parameters(), plain.parameters()))
    with fake_tensors():
        model, batch = made()
        assert step(model, batch, torch.sum).peak_bytes == most


def test_each_node_of_a_graph_comes_once_also_if_it_is_given_twice():
    node = (torch.ones(1, requires_grad=True) * 2).grad_fn
    assert len(list(nodes_from([node, None, node]))) == 2  # with the leaf's


def test_a_storage_does_not_hold_what_follows_it():
    weight, lifetimes = torch.ones(2), StorageLifetimes()
    lifetimes.begin(weight.untyped_storage())
    gone = weakref.ref(lifetimes)
    del lifetimes
    gc.collect()
    assert gone() is None and weight.numel()


def test_a_finished_bill_no_longer_changes():
    model = nn.Linear(8, 8)
    bill = step(model, torch.ones(4, 8))
    before = [list(sizes) for _, sizes in bill.lives]
    del model
    assert [sizes for _, sizes in bill.lives] == before


def test_a_checkpoints_second_run_is_recomputed_activations():
    inner = nn.Sequential(*(nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(3)))
    bill = step(Run(lambda m, x: checkpoint(m.inner, x, use_reentrant=False), inner=inner), torch.ones(100, 8))
    recomputed = [row for row in bill.peak if row.kind == "recomputed activation"]
    assert sum(row.bytes for row in recomputed) > 3 * 100 * 64 * 4 * 0.9 and recomputed[0].module.startswith("inner.")


@pytest.mark.nightly
def test_a_compiled_block_in_a_checkpoint_is_watched_as_it_runs():
    """Under a mode of torch functions its second run saves other tensors than its first, and torch refuses that."""
    blocks = nn.ModuleList(nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in "12")
    for block in blocks:
        block.compile(backend="aot_eager")

    def run(m, x):
        for block in m.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.square()

    model, batch = Run(run, blocks=blocks), torch.randn(4, 8, 32)
    with record(model):
        model(batch)
    assert_bill_is_the_count(model, batch, torch.mean)


def test_what_the_next_operation_makes_is_not_on_the_bill():
    def two(m, x):
        first = torch.zeros(1000)
        del first
        second = torch.zeros(500)
        return x * 3 if second is not None else x

    bill = step(Run(two), torch.zeros(10, requires_grad=True))
    assert sum(row.bytes for row in bill.peak) == bill.peak_bytes == 4000 + 40


def test_a_lazy_modules_weights_have_gradients_in_its_first_step():
    kinds = step(nn.LazyLinear(8), torch.ones(4, 8)).by_kind()
    assert kinds["gradient"] == kinds["weight"] == 4 * (8 * 8 + 8)


def test_after_the_optimizers_step_comes_forward_again():
    model = nn.Linear(8, 8)
    with watch_step(model, optimizer := torch.optim.SGD(model.parameters())) as bill:
        for _ in range(2):
            model(torch.ones(4, 8)).sum().backward()
            optimizer.step()
    assert [name for name, _ in bill.phases] == ["forward", "backward", "forward", "optimizer"] * 2
    assert "made by the optimizer" not in {row.kind for row, _ in bill.lives}


def test_emptied_storages_count_with_what_is_left():
    def emptying(m, x):
        first = x.detach().repeat(100)
        first.untyped_storage().resize_(0)
        second = x.detach().repeat(100)
        del first, second
        return x * 3

    x = torch.zeros(10, requires_grad=True)
    before = dict(vars(torch.UntypedStorage))  # other code in this process may have set its own
    assert step(Run(emptying), x).peak_bytes == 40 + 4000
    assert dict(vars(torch.UntypedStorage)) == before


@pytest.mark.by_day(2)
@pytest.mark.parametrize(("sequence", "recompute"), covering([False, True], RECOMPUTE_MODES, of=1))
def test_a_rank_of_tensor_and_sequence_parallelism(sequence, recompute):
    with emulated_rank(2, real_tensors=True):
        tp = tensor_parallel(sequence_parallel=sequence)
        model = TransformerLayer(SHAPE, tp, recompute=recompute, dtype=torch.float32)
        batch = torch.randn(8 if sequence else 16, 2, 32, requires_grad=True)
        assert_bill_is_the_count(model, batch, loss_of)


def pipeline_bill():
    from actmem.pipeline import Pipeline, make_mesh

    shape = ModelShape(16, 1, 32, 4, num_layers=4, vocab_size=64)
    pipeline = Pipeline(shape, make_mesh("cpu", 4, 1), num_microbatches=4, p=0.0, dtype=torch.float32)
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    pipeline.step(tokens, tokens)
    pipeline.step(tokens, tokens)
    with watch_step(pipeline.parts[0], batch=tokens) as bill:
        pipeline.step(tokens, tokens)
    (stage,) = pipeline.stages
    # Of the buffers for gradients, all there from the start, the bill has those that backward has read.
    infos = [info for some in stage.grad_recv_info.values() for info in some]
    unread = sum(info.buffer.nbytes for info in infos) - bill.by_kind().get("from before", 0)
    known = [*existing(pipeline.parts[0], tokens, None), *receive_buffers_of(stage), *(info.buffer for info in infos)]
    second = most_alive(lambda: pipeline.step(tokens, tokens), known) - unread
    return sum(row.bytes for row in bill.peak), bill.peak_bytes, second, bill.by_kind()["activation"]


def test_four_ranks_of_a_pipeline(pools):
    bills = pools[4].run(pipeline_bill)
    assert all(billed == peak == counted > 0 for billed, peak, counted, _ in bills), bills
    activations = [activation for *_, activation in bills]
    assert activations[0] > activations[2], "the first rank has the most microbatches in flight"


@pytest.mark.parametrize("loss", [lambda y: y, lambda y: y.sum().detach(), lambda y: 3])
def test_a_loss_that_is_none_is_refused(loss):
    with pytest.raises(ConfigError, match="loss: must be one number that needs a gradient"):
        step(nn.Linear(4, 4), torch.ones(2, 4), loss)


def test_an_optimizer_that_runs_the_model_again_is_refused():
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="optimizer: must step without a closure"):
        step(model, torch.ones(2, 4), optimizer=torch.optim.LBFGS(model.parameters()))


def test_a_model_that_differentiates_inside():
    def run(m, x):
        return m.linear(x) + torch.func.grad(lambda p: (p**2).sum())(x).exp()

    model = Run(run, linear=nn.Linear(8, 8))
    bill = step(model, (x(),))
    assert bill.peak_bytes == sum(row.bytes for row in bill.peak) == max(bill.curve)


def test_an_output_of_complex_numbers_has_a_loss_and_one_without_numbers_none():
    assert step(Run(lambda m, x: torch.fft.fft(x)), (x(),)).peak_bytes > 0
    with pytest.raises(ConfigError, match="no floating-point tensor"):
        step(Run(lambda m, x: "words"), (x(),))
