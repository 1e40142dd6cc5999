"""measure_peers as a user starts it, and that DTensor's layer computes what ours does: else times say nothing."""

import json
import warnings
from functools import partial

import pytest
import torch
from measure_peers import DTENSOR, MODES, OUR_COLLECTIVE, OURS, our_reduce_scatter, runners_of

from actmem.config import ModelShape, Parallel
from actmem.formulas.activations import gathered_input_bytes, layer_rows
from actmem.ledger.emulate import emulated_rank
from actmem.ledger.recorder import record
from actmem.ledger.storages import replaced
from actmem.parallel import collectives
from actmem.parallel.groups import tensor_parallel
from actmem.rows import total
from actmem_course.ranks import Ranks
from tests.labs.in_process import lab_results, shown_in_80_columns
from tests.tiers import at_night

SCRIPT, SHAPE = "measure_peers.py", ModelShape(16, 2, 32, 4)
TINY = ["--seq-length", 16, "--micro-batch-size", 2, "--hidden-size", 32, "--num-attention-heads", 4, "--rounds", 2]


@pytest.mark.parametrize("ranks", [0, at_night(2)])
def test_every_mode_and_layer(ranks, pools, tmp_path):
    path, names = tmp_path / "peers.json", [OURS, DTENSOR]
    if ranks:
        rows, names = lab_results(pools[ranks], SCRIPT, *TINY), [*names, OUR_COLLECTIVE]
    else:
        assert "gloo" not in shown_in_80_columns(SCRIPT, *TINY, "--json", path, "--emulate", 2)
        rows = json.loads(path.read_text())
    assert [(row["mode"], row["name"]) for row in rows] == [(mode, name) for mode in MODES for name in names]
    for row in rows:
        assert row["combined_seconds"] > 0 and row["peak_bytes"] >= row["held_bytes"] > 0
        assert (row["ours"] is None) == (row["name"] == OURS) and (row["over"] is None) == (row["mode"] == "none")


def computed(runner, context=None):
    work = runner.work().under(context) if context else runner.work()
    output = work.forward()
    work.backward(output)
    found = output.detach(), runner.leaf.grad
    work.finish()
    return found


def differences_on_ranks():
    """Of output and input's gradient between our layer and DTensor's, in float64 and without dropout; and how many
    reduce-scatters were ours, as shipped and with our collective."""
    warnings.filterwarnings("ignore")
    tp, calls = tensor_parallel(sequence_parallel=True), []
    here = Ranks(tp.rank, tp.size, "cpu", False)
    found = []
    for mode in MODES:
        ours, theirs = runners_of(SHAPE, here, torch.float64, mode, p=0.0)
        expected = computed(ours)
        for context in (None, partial(our_reduce_scatter, tp)):
            calls.clear()
            with replaced(collectives, "start_sending_parts", lambda start: lambda *a: calls.append(1) or start(*a)):
                pairs = zip(computed(theirs, context), expected)
            found.append((max(float((one - other).abs().max()) for one, other in pairs), len(calls)))
    return found


def test_dtensor_computes_the_same_with_either_reduce_scatter(pools):
    for found in pools[2].run(differences_on_ranks):
        assert max(difference for difference, _ in found) < 1e-12
        # Two of forward, two of backward; full recomputation runs the first one again, and stops before the second.
        assert [calls for _, calls in found] == [0, 4, 0, 4, 0, 5]


@pytest.mark.by_day(1)
@pytest.mark.parametrize("t", [2, 4])
def test_dtensor_keeps_the_gathered_inputs(t):
    statistics = 4 * 4 * SHAPE.micro_batch_size * 16 // t  # of two norms; the masks are buffers
    by_formula = total(layer_rows(SHAPE, Parallel(t, sequence_parallel=True), element_size=4)) + statistics
    saved = []
    with emulated_rank(t, real_tensors=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for runner in runners_of(SHAPE, Ranks(0, t, "cpu", True), torch.float32, "none"):
            with record(runner.module) as ledger:
                output = runner.module(runner.leaf.clone())
            saved.append(ledger.total_bytes)
            del output
    assert saved == [by_formula, by_formula + gathered_input_bytes(SHAPE, t, 4)]
