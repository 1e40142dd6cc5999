"""torch's zero-bubble schedule on real ranks: our list of actions, and what its split backward keeps until "W"."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from actmem.config import ModelShape, Parallel
from actmem.formulas.first_stage import stage_extra_rows, stage_rows
from actmem.formulas.schedule import held
from actmem.pipeline import Pipeline, make_mesh
from actmem.rows import total
from actmem_course.bench.held import InFlight
from actmem_course.others.zero_bubble import weight_gradient_rows, zero_bubble_h1
from tests.measure.listed_pipeline import SPLITS_BACKWARDS

pytestmark = pytest.mark.skipif(not SPLITS_BACKWARDS, reason="before torch 2.13 backwards can't be split here")

SHAPE = ModelShape(8, 2, 24, 4, num_layers=8, vocab_size=20)
CUTS = [(4, 1, 1, 6), (2, 2, 1, 4), (2, 2, 2, 4), (4, 1, 2, 4)]  # p, t, chunks, microbatches


class UntilWeight(InFlight):
    """Forgets a microbatch after its "W", not after its "B"; what is gone by itself at "B" no longer counts."""

    def __init__(self):
        super().__init__()
        self.kinds: list[str] = []

    def after(self, kind, stage, microbatch):
        self.kinds.append(kind)
        super().after({"F": "F", "B": "F", "W": "B"}[kind], stage, microbatch)

    def _rows(self, sample):
        return []  # by term, they would be those that forward saved, also where "B" has freed some


def weights_watched(stage, run, watcher, microbatch, *args, **kwargs):
    run(microbatch, *args, **kwargs)
    watcher.after("W", stage, microbatch)


def split_step(cut, dropout):
    """Actions and bytes of one step on torch's ScheduleInterleavedZeroBubble, and the gradients' distance to those of
    torch's whole backwards."""
    p, t, chunks, n = cut
    watcher = UntilWeight()
    arguments = {"num_microbatches": n, "num_model_chunks": chunks, "sequence_parallel": t > 1, "p": dropout}
    mesh = make_mesh("cpu", p, t)
    pipeline = Pipeline(SHAPE, mesh, watcher=watcher, dtype=torch.float64, seed=1, **arguments)
    plain = Pipeline(SHAPE, mesh, dtype=torch.float64, seed=1, **arguments)
    stages: list[Any] = pipeline.stages
    for stage in stages:
        stage.backward_weight_one_chunk = partial(weights_watched, stage, stage.backward_weight_one_chunk, watcher)
    pipeline.schedule = ScheduleInterleavedZeroBubble(
        [*pipeline.stages], n_microbatches=n, loss_fn=pipeline._loss, scale_grads=False
    )
    batch = torch.randint(0, 20, (n * 2, 8), generator=torch.Generator().manual_seed(4))
    for one in (pipeline, plain):
        one.step(batch, batch.roll(-1, 1))
    errors = [
        (a.grad - b.grad).abs().max().item()
        for one, other in zip(pipeline.parts, plain.parts)
        for a, b in zip(one.parameters(), other.parameters())
    ]
    samples = [
        (kind, s.stage, s.microbatch, s.in_flight, s.kept_bytes) for kind, s in zip(watcher.kinds, watcher.samples)
    ]
    return samples, max(errors)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_torch_runs_our_list_and_frees_at_w(pools, cut):
    p, t, chunks, n = cut
    ranks = zero_bubble_h1(p, n, chunks)
    for rank, (samples, error) in enumerate(pools[4].run(split_step, cut, 0.0)):
        actions = ranks[rank // t]
        assert error < 1e-12
        assert [sample[:3] for sample in samples] == [(a.kind, a.chunk * p + a.rank, a.microbatch) for a in actions]
        assert [sample[3] for sample in samples] == held(actions)


def test_torch_keeps_nearly_all_until_w(pools):
    """Its "B" retains the graph, which keeps all that lies below the last weight: only the last dropout mask goes.

    On the first stage, which sends no gradient back, "B" runs nothing.  The products need much less: see
    ``weight_gradient_rows``.
    """
    p, t, chunks, n = 4, 1, 1, 6
    parallel = Parallel(t, False, p)
    _, b, h, s = SHAPE.letters()
    place = (SHAPE, parallel)
    waiting = total(weight_gradient_rows(SHAPE, parallel, 8)) * (SHAPE.num_layers // p)
    for rank, (samples, _) in enumerate(pools[4].run(split_step, (p, t, chunks, n), 0.1)[: p - 1]):
        of_rank = (*place, rank, "none", 1, 8)
        each = total(stage_rows(*of_rank)) + total(stage_extra_rows(*of_rank))
        freed = s * b * h if rank else 0
        actions = zero_bubble_h1(p, n)[rank]
        assert [sample[4] for sample in samples] == held(actions, lambda a: each, lambda a: each - freed)
        assert each - freed > waiting
