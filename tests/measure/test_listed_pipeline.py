"""Lists of actions on real ranks: the short warm-up and four schedules on a V, their bytes and their gradients."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules

from actmem.config import ConfigError, ModelShape, Parallel
from actmem.formulas.first_stage import HEAD_TERMS, stage_extra_rows, stage_rows
from actmem.formulas.schedule import (
    Action,
    held,
    interleaved,
    one_forward_one_backward,
    peak_in_flight,
    split_backwards,
    stage_at,
)
from actmem.pipeline import Pipeline, make_mesh
from actmem.rows import by_term, total
from actmem_course.bench.held import InFlight
from actmem_course.others.zero_bubble import (
    dual_pipe_v,
    v_half,
    v_min,
    weight_gradient_rows,
    zero_bubble_h1,
    zero_bubble_v,
)
from tests.measure import listed_pipeline
from tests.measure.listed_pipeline import SPLITS_BACKWARDS, ListedPipeline, in_torchs_words
from tests.rank_pool import RankFailed
from tests.tiers import covering

SHAPE = ModelShape(8, 2, 24, 4, num_layers=8, vocab_size=20)
E = 8  # float64
WHOLE_ON_A_V = "ZB-V's order, whole backwards"
ON_A_V = {
    "ZB-V": zero_bubble_v,
    "DualPipeV": dual_pipe_v,
    "V-Half": v_half,
    "V-Min": v_min,
    WHOLE_ON_A_V: zero_bubble_v,
}
OF_TORCH = {"ZB-V": "ScheduleZBVZeroBubble", "DualPipeV": "ScheduleDualPipeV"}
GRIDS = [(2, 1, 4), (2, 2, 4), (4, 1, 8)]  # p, t, microbatches


def with_whole_backwards(ranks):
    return [[action for action in own if action.kind != "W"] for own in ranks]


def schedule_of(name, p, n):
    """Actions of every rank, chunks a rank, whether they lie on a V."""
    if name == "short warm-up":
        return interleaved(p, 2, n, short_warmup=True), 2, False
    if name == "4 chunks, short warm-up":
        return interleaved(p, 4, n, short_warmup=True), 4, False
    m, ranks = (1, zero_bubble_h1(p, n)) if name == "ZB-H1" else (2, ON_A_V[name](p, n))
    if name == WHOLE_ON_A_V:
        ranks = with_whole_backwards(ranks)
    if not SPLITS_BACKWARDS and any(split_backwards(own) for own in ranks):
        pytest.skip("before torch 2.13 backwards can't be split here")
    return ranks, m, m == 2


class WithGradients(InFlight):
    """Counts besides what graphs hold the gradients that torch's "B" left for "W", after every action."""

    def __init__(self, split):
        super().__init__(split)
        self.waiting: list[int] = []

    def after(self, kind, stage, microbatch):
        super().after(kind, stage, microbatch)
        states = [state for one in self._stages.values() for state in one.backward_state.values()]
        gradients = [
            gradient
            for _, groups, *_ in states
            for group in groups or []
            for of_node in group["grads"]
            for gradient in of_node
            if gradient is not None
        ]
        storages = {id(g.untyped_storage()): g.untyped_storage().nbytes() for g in gradients}
        assert not storages.keys() & self._kept().keys()
        self.waiting.append(sum(storages.values()))


def run_list(name, p, t, n, dropout, torchs_class):
    """One step on these ranks: (kind, stage, microbatch, in flight, bytes of graphs) of each action, the gradients that
    waited, and each stage's gradients of the weights."""
    ranks, _, v_shaped = schedule_of(name, p, n)
    rank = dist.get_rank() // t
    watcher = WithGradients({(stage_at(rank, c, p, v_shaped), i) for c, i in split_backwards(ranks[rank])})
    pipeline = ListedPipeline(
        SHAPE,
        make_mesh("cpu", p, t),
        in_torchs_words(ranks, v_shaped),
        watcher=watcher,
        sequence_parallel=t > 1,
        p=dropout,
        dtype=torch.float64,
        seed=1,
    )
    if torchs_class:
        arguments: Any = {"n_microbatches": n, "loss_fn": pipeline._loss, "scale_grads": False}
        pipeline.schedule = getattr(torch_schedules, torchs_class)([*pipeline.stages], **arguments)
    losses = pipeline.step(*batch(n))
    samples = [(s.kind, s.stage, s.microbatch, s.in_flight, s.kept_bytes) for s in watcher.samples]
    return samples, watcher.waiting, gradients_by_stage(pipeline), losses


def plain_step(p, t, n, m, dropout):
    """Gradients and losses of torch's ScheduleInterleaved1F1B (m = 1: Schedule1F1B)."""
    mesh = make_mesh("cpu", p, t)
    options = {"sequence_parallel": t > 1, "p": dropout, "dtype": torch.float64, "seed": 1}
    pipeline = Pipeline(SHAPE, mesh, num_microbatches=n, num_model_chunks=m, **options)
    losses = pipeline.step(*batch(n))
    return gradients_by_stage(pipeline), losses


def batch(n):
    tokens = torch.randint(0, 20, (n * 2, 8), generator=torch.Generator().manual_seed(4))
    return tokens, tokens.roll(-1, 1)


def gradients_by_stage(pipeline):
    return {
        (stage.stage_index, pipeline.tp.rank): [parameter.grad for parameter in stage.submod.parameters()]
        for stage in pipeline.stages
    }


def merged(results):
    return {key: gradients for found in results for key, gradients in found.items()}


@cache
def stage_bytes(stage, num_stages, t):
    """A chunk keeps what the same stage of a pipeline with as many ranks keeps for one microbatch."""
    place = (SHAPE, Parallel(t, t > 1, num_stages), stage, "none", 1, E)
    return total(stage_rows(*place)) + total(stage_extra_rows(*place))


@cache
def freed_at_b(stage, num_stages, t, dropout):
    """What torch's "B" frees: what lies above the stage's last weight.  On the first stage "B" runs nothing."""
    if not stage:
        return 0
    _, b, h, s = SHAPE.letters()
    if stage < num_stages - 1:
        return s * b * h // t if dropout else 0  # the last dropout mask
    rows = stage_rows(SHAPE, Parallel(t, t > 1, num_stages), stage, "none", 1, E)
    return by_term(rows)[HEAD_TERMS[2]] + 4 * s * b  # logits and target ids


def left_for_w(stage, num_stages, t):
    """Gradients that torch's "B" stores: those that the linears' "W" reads, and those of each norm's output.

    With sequence parallelism it stores a row-parallel linear's twice: gathered for the weight, a shard for the bias.
    """
    if not stage:
        return 0
    _, b, h, s = SHAPE.letters()
    rows = weight_gradient_rows(SHAPE, Parallel(t, t > 1), E)
    layer = total(row for row in rows if row.term.startswith("gradient")) + 2 * E * s * b * h // t
    layer += 2 * E * s * b * h if t > 1 else 0
    ends = E * s * b * (h + SHAPE.vocab_size) // t if stage == num_stages - 1 else 0
    return SHAPE.num_layers // num_stages * layer + ends


def check_bytes(ranks, p, t, m, v_shaped, dropout, results):
    """In flight and bytes after every action of every rank are those of the list."""
    for index, (samples, waiting, *_) in enumerate(results):
        actions = ranks[index // t]

        def stage(action: Action) -> int:
            return stage_at(action.rank, action.chunk, p, v_shaped)

        assert [sample[:3] for sample in samples] == [(a.kind, stage(a), a.microbatch) for a in actions]
        assert [sample[3] for sample in samples] == held(actions)
        assert [sample[4] for sample in samples] == held(
            actions,
            lambda a: stage_bytes(stage(a), p * m, t),
            lambda a: stage_bytes(stage(a), p * m, t) - freed_at_b(stage(a), p * m, t, dropout),
        )
        # Nothing from "F" to "B", then the gradients until "W".
        assert waiting == held(actions, lambda a: 0, lambda a: left_for_w(stage(a), p * m, t))


@pytest.mark.parametrize(("name", "grid"), covering(["short warm-up", *ON_A_V], GRIDS, of=1), ids=str)
def test_bytes_of_every_rank_are_those_of_the_list(pools, name, grid):
    p, t, n = grid
    ranks, m, v_shaped = schedule_of(name, p, n)
    check_bytes(ranks, p, t, m, v_shaped, 0.1, pools[p * t].run(run_list, name, *grid, 0.1, None))


@pytest.mark.parametrize(("name", "grid"), covering(list(OF_TORCH), GRIDS, of=1), ids=str)
def test_torchs_own_classes_run_the_same_list_and_hold_as_much(pools, name, grid):
    p, t, n = grid
    ranks, m, v_shaped = schedule_of(name, p, n)
    check_bytes(ranks, p, t, m, v_shaped, 0.1, pools[p * t].run(run_list, name, *grid, 0.1, OF_TORCH[name]))


@pytest.mark.parametrize(
    ("m", "grid"), [(2, (2, 1, 6)), (4, (2, 1, 6)), (2, (2, 2, 4)), (4, (2, 2, 4)), (2, (4, 1, 8))], ids=str
)
def test_a_short_warm_up_holds_pm_chunks_and_gives_torchs_gradients(pools, m, grid):
    p, t, n = grid
    name = "short warm-up" if m == 2 else "4 chunks, short warm-up"
    results = pools[p * t].run(run_list, name, *grid, 0.1, None)
    check_bytes(interleaved(p, m, n, short_warmup=True), p, t, m, False, 0.1, results)
    assert max(sample[3] for sample in results[0][0]) == p * m  # torch's holds pm + p − 1
    assert peak_in_flight(interleaved(p, m, n))[0] == p * m + p - 1
    assert same(results, pools[p * t].run(plain_step, p, t, n, m, 0.1))


@pytest.mark.parametrize(("name", "grid"), covering(["ZB-H1", *ON_A_V], GRIDS, of=1), ids=str)
def test_a_list_gives_the_gradients_of_whole_backwards(pools, name, grid):
    p, t, n = grid
    _, m, _ = schedule_of(name, p, n)
    assert same(pools[p * t].run(run_list, name, *grid, 0.1, None), pools[p * t].run(plain_step, p, t, n, m, 0.1))


def same(results, plain_results):
    """Gradients and losses are equal bit by bit."""
    found, wanted = merged(result[2] for result in results), merged(result[0] for result in plain_results)
    losses = [max((result[-1] for result in side), key=len) for side in (results, plain_results)]
    assert found.keys() == wanted.keys() and len(losses[0]) == len(losses[1]) > 0
    pairs = [pair for key, gradients in wanted.items() for pair in zip(gradients, found[key], strict=True)]
    return all(torch.equal(one, other) for one, other in [*pairs, *zip(*losses)])


def test_torch_keeps_more_from_b_to_w_than_the_products_need():
    """On a stage in the middle: 92,544 bytes for 49,152, its graph and the gradients beside what "W" reads."""
    stage, stages, t = 2, 8, 1
    torchs = stage_bytes(stage, stages, t) - freed_at_b(stage, stages, t, True) + left_for_w(stage, stages, t)
    assert (torchs, total(weight_gradient_rows(SHAPE, Parallel(), E))) == (92_544, 49_152)


def refused(orders, torch_splits=SPLITS_BACKWARDS):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listed_pipeline, "SPLITS_BACKWARDS", torch_splits)
        ListedPipeline(SHAPE, make_mesh("cpu", 2, 1), orders)


WHOLE = in_torchs_words(one_forward_one_backward(2, 2))


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        (in_torchs_words(one_forward_one_backward(4, 4)), "orders: must have a list of actions for each of the 2 pipe"),
        ([WHOLE[0], []], "orders: must have a list of actions for each of the 2 pipeline ranks"),
        ([["0F0", "0X0"], WHOLE[1]], "orders: must have actions such as 5F2, 5B2, 5I2 and 5W2, got '0X0'"),
        ([["0F0", *WHOLE[0]], WHOLE[1]], "orders: must have no action twice"),
        ([WHOLE[1], WHOLE[0]], "orders: ranks must have the stages [{0}, {1}], or lie on a V, got [{1}, {0}]"),
        ([WHOLE[0][:-1], WHOLE[1]], "orders: Invalid backward microbatches for stage 0"),
        ([WHOLE[0], WHOLE[1][::-1]], "orders: Rank 1, step 0: Running Full Backward for stage 1, microbatch 1 without"),
        (
            in_torchs_words(with_whole_backwards(zero_bubble_v(2, 4))),
            "orders: Malformed compute schedule, can't schedule sends/recvs",
        ),
        (
            in_torchs_words(with_whole_backwards(zero_bubble_v(2, 3)), True),
            "num_microbatches: 3 must be divisible by pipeline_parallel_size",
        ),
    ],
)
def test_a_list_that_cannot_run_is_refused_on_every_rank(pools, orders, message):
    with pytest.raises(RankFailed) as error:
        pools[2].run(refused, orders)
    assert str(error.value).count(f"{ConfigError.__name__}: {message}") == 2


@pytest.mark.parametrize("word", ["0I0", "0W0"])
def test_an_old_torch_refuses_split_backwards(pools, word):
    with pytest.raises(RankFailed, match="""orders: "I" and "W" need torch 2.13 or newer, this is 2"""):
        pools[2].run(refused, [["0F0", word], WHOLE[1]], False)
