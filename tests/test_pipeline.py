"""The pipeline computes what one process computes, and holds what eq. 5 says."""

import re

import pytest
import torch
from measure_pipeline import MemoryWatcher
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from actmem.config import ConfigError, ModelShape, Parallel
from actmem.formulas.schedule import held, interleaved, one_forward_one_backward, torch_microbatches_per_round
from actmem.formulas.stages import in_flight, stage_rows
from actmem.layers.gpt import GPT
from actmem.parallel.linear import load_dense
from actmem.pipeline import Pipeline, make_mesh
from actmem.rows import compare
from tests.gradients import gradient_pairs, largest_difference, part_of_state
from tests.rank_pool import RankFailed
from tests.tiers import covering

SHAPE = ModelShape(8, 2, 24, 4, num_layers=8, vocab_size=20)
#: From 2.15 on torch frees a stage's output once it is sent.
FREES_SENT_OUTPUTS = hasattr(PipelineStage, "release_fwd_send_outputs")
#: torch 2.9's interleaved schedule waits for a send before its next action; later ones wait at the end of the step.
WAITS_FOR_EACH_SEND = not hasattr(ScheduleInterleaved1F1B, "register_custom_function")
CUTS = [  # p, t, chunks, microbatches
    (4, 1, 1, 6),
    (2, 2, 1, 4),
    (4, 1, 2, 4),
    (2, 2, 2, 6),
    (2, 2, 4, 4),
    (1, 4, 1, 2),
]


def dense_step(microbatches):
    torch.manual_seed(3)
    dense = GPT(SHAPE, p=0.0, dtype=torch.float64)
    for parameter in dense.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokens, targets = torch.randint(0, 20, (2, microbatches * 2, 8)).unbind()
    losses = []
    for x, y in zip(tokens.chunk(microbatches), targets.chunk(microbatches)):
        loss = dense.loss(dense(x), y)
        (loss / microbatches).backward()
        losses.append(loss.detach())
    return dense, tokens, targets, torch.stack(losses)


def pipeline_of(cut, **options):
    p, t, chunks, microbatches = cut
    sizes = {"num_microbatches": microbatches, "num_model_chunks": chunks}
    return Pipeline(SHAPE, make_mesh("cpu", p, t), **sizes, **options)


def largest_error(cut, recompute, free_outputs, sequence_parallel=True):
    dense, tokens, targets, dense_losses = dense_step(cut[-1])
    modes = {"sequence_parallel": sequence_parallel, "recompute": recompute, "free_outputs": free_outputs}
    pipeline = pipeline_of(cut, **modes, p=0.0, dtype=torch.float64)
    for part in pipeline.parts:
        load_dense(part, part_of_state(dense, part), pipeline.tp)
    losses = pipeline.step(tokens, targets)
    pairs = [(torch.stack(losses), dense_losses)] if losses else []
    pairs += [pair for part in pipeline.parts for pair in gradient_pairs(part, dense, pipeline.tp)]
    return largest_difference(pairs), len(losses)


@pytest.mark.by_day(5)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("cut", "sequence_parallel", "free_outputs"),
    [*((cut, True, False) for cut in CUTS), *((cut, True, True) for cut in CUTS[:2]), ((1, 4, 1, 2), False, False)],
    ids=str,
)
def test_losses_and_gradients_equal_one_process(pools, cut, sequence_parallel, free_outputs, recompute):
    results = pools[4].run(largest_error, cut, recompute, free_outputs, sequence_parallel)
    assert max(error for error, _ in results) < 1e-12
    p, t, _, microbatches = cut
    assert [count for _, count in results] == [0] * (p - 1) * t + [microbatches] * t


def wrong_batches_refused():
    pipeline, good = pipeline_of((1, 1, 1, 2)), torch.zeros(4, 8, dtype=torch.int64)
    for wrong in (good[:3], torch.cat([good, good]), good[:, :7], good[:, 0], good[None]):
        for name, batch in (("tokens", (wrong, good)), ("targets", (good, wrong))):
            sizes = re.escape(f"[4, 8], got {list(wrong.shape)}")
            with pytest.raises(ConfigError, match=rf"^{name}: must be \[num_microbatches · b, s\] = {sizes}$"):
                pipeline.step(*batch)
    return len(pipeline.step(good, good))


def test_a_batch_of_other_sizes_is_refused(pools):
    assert pools[1].run(wrong_batches_refused) == [2]


def watched(cut, free_outputs, recompute="none"):
    watcher = MemoryWatcher()
    modes = {"sequence_parallel": True, "recompute": recompute, "free_outputs": free_outputs}
    pipeline = pipeline_of(cut, **modes, watcher=watcher, dtype=torch.bfloat16)
    tokens = torch.randint(0, 20, (cut[-1] * 2, 8))
    pipeline.step(tokens, tokens)
    return watcher.samples, watcher.peak_rows


@pytest.mark.by_day(1)
@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut[2] == 1], ids=str)
def test_freeing_outputs_frees_all_but_the_one_on_its_way(pools, cut):
    p, t, _, _ = cut
    output = 2 * 8 * 2 * 24 // t
    kept, freed = pools[4].run(watched, cut, False), pools[4].run(watched, cut, True)
    for rank, ((samples, _), (samples_freed, _)) in enumerate(zip(kept, freed)):
        assert [s["kept_bytes"] for s in samples] == [s["kept_bytes"] for s in samples_freed]
        if rank // t < p - 1:  # the last stage's output goes to the loss and nowhere else
            if FREES_SENT_OUTPUTS:
                assert max(s["output_bytes"] for s in samples) <= 2 * output
            else:
                # One for each microbatch in flight; torch's list of warm-up sends may hold one more.
                beyond = {s["output_bytes"] - output * s["in_flight"] for s in samples if s["kind"] == "F"}
                assert 0 in beyond and beyond <= {0, output}
            assert max(s["output_bytes"] for s in samples_freed) <= 2 * output
            assert all(s["output_bytes"] == 0 for s in samples_freed if s["kind"] == "B")


def test_interleaved_holds_every_output_until_the_step_ends_or_torch_frees_them(pools):
    cut = p, t, chunks, microbatches = 4, 1, 2, 4
    output = 2 * 8 * 2 * 24 // t
    for rank, (samples, _) in enumerate(pools[4].run(watched, cut, False)):
        sent = chunks - (rank == p - 1)  # the very last stage sends nothing
        assert samples[-1]["in_flight"] == 0
        if WAITS_FOR_EACH_SEND:  # and holds the logits, which it will join
            logits = 2 * 8 * 2 * 20 * microbatches if rank == p - 1 else 0
            assert samples[-1]["output_bytes"] - logits in (0, output)
        elif FREES_SENT_OUTPUTS:
            assert samples[-1]["output_bytes"] <= output  # the last one, if it is still on its way
        else:
            assert samples[-1]["output_bytes"] == sent * microbatches * output
    with pytest.raises(RankFailed, match="free_outputs"):
        pools[4].run(watched, cut, True)


def outputs_noted_after_steps(cut, free_outputs):
    """How many outputs the stages of this rank remember after one step, and after five, with nobody watching."""
    pipeline, tokens = pipeline_of(cut, free_outputs=free_outputs), torch.randint(0, 20, (cut[-1] * 2, 8))
    counts = []
    for _ in range(5):
        pipeline.step(tokens, tokens)
        counts.append(sum(len(stage._outputs) for stage in pipeline.stages))
    return counts[0], counts[-1]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("cut", "free_outputs"), [((2, 2, 1, 4), False), ((2, 2, 1, 4), True), ((2, 2, 2, 4), False)])
def test_stages_forget_outputs_that_are_gone(pools, cut, free_outputs):
    assert all(last <= first for first, last in pools[4].run(outputs_noted_after_steps, cut, free_outputs))


def ends_of_the_embedding(cut):
    torch.manual_seed(3)
    return [part.words.weight.detach() for part in pipeline_of(cut).parts if part.is_first or part.is_last]


@pytest.mark.parametrize("cut", [cut for cut in CUTS if cut[0] > 1], ids=str)
def test_both_ends_begin_with_one_embedding(pools, cut):
    found = [weights for weights in pools[4].run(ends_of_the_embedding, cut) if weights]
    half = len(found) // 2  # the first stage's ranks, then the last one's
    assert half == cut[1] and all(torch.equal(one, other) for (one,), (other,) in zip(found[:half], found[half:]))


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("cut", "recompute"), covering(CUTS, ["none", "selective", "full"], of=1), ids=str)
def test_the_runtime_runs_the_schedule_that_is_drawn_and_holds_the_formulas_bytes(pools, cut, recompute):
    p, t, chunks, microbatches = cut
    parallel = Parallel(t, True, p, chunks)
    per_round = torch_microbatches_per_round(p, microbatches) if chunks > 1 else None
    if chunks == 1:
        orders = one_forward_one_backward(p, microbatches)
    else:
        orders = interleaved(p, chunks, microbatches, per_round)
    for rank, (samples, rows) in enumerate(pools[4].run(watched, cut, False, recompute)):
        place = (SHAPE, parallel, rank // t, recompute, microbatches)
        predicted = stage_rows(*place, microbatches_per_round=per_round)
        comparison = compare(predicted, [row for row in rows if not row.extra])
        assert comparison.exact, f"rank {rank}: {comparison.describe()}"
        assert max(s["in_flight"] for s in samples) == in_flight(parallel, rank // t, microbatches, per_round)
        ours = [(a.kind, a.chunk * p + a.rank, a.microbatch) for a in orders[rank // t]]
        assert [(s["kind"], s["stage"], s["microbatch"]) for s in samples] == ours
        assert [s["in_flight"] for s in samples] == held(orders[rank // t])
