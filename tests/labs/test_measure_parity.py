"""Parity as a user runs it: real processes, JSON, bad input in one line, and gradients that are no numbers."""

import math
from collections import Counter

import measure_parity
from measure_parity import FORMS

from actmem.config import TINY, ModelShape, Parallel
from actmem.formulas.communication import counts, layer_collectives
from actmem.ledger.emulate import emulated_rank
from actmem_course.ranks import Ranks
from tests.labs.in_process import lab_results

SCRIPT = "measure_parity.py"
SEEN_IN_PARTS = ["norm1.weight", "norm1.bias", "attention.projection.bias"]
SEEN_IN_PARTS += ["norm2.weight", "norm2.bias", "mlp.down.bias"]
SMALL = ["--seq-length", 16, "--micro-batch-size", 3, "--hidden-size", 48]


def test_on_real_ranks(pools):
    check_results(lab_results(pools[2], SCRIPT, *SMALL), 2)


def check_results(results, processes):
    assert [r["form"] for r in results] == list(FORMS) * processes
    for r in results:
        assert r["exact"] and r["largest_error"] < 1e-12, r
        sequence = FORMS[r["form"]].get("sequence_parallel", False)
        kept = FORMS[r["form"]].get("keep_gathered_input", False)
        predicted = layer_collectives(TINY, Parallel(processes, sequence), keep_gathered_input=kept)
        assert Counter(r["forward"]) + Counter(r["backward"]) == counts(predicted)
        assert r["partial_gradients"] == (SEEN_IN_PARTS if sequence else [])


def test_a_gradient_that_is_no_number_is_found(monkeypatch):
    broken = lambda layer, tp: layer.mlp.down.bias.grad.fill_(math.nan)  # noqa: E731
    monkeypatch.setattr(measure_parity, "reduce_partial_gradients", broken)
    with emulated_rank(1, real_tensors=True):
        row = measure_parity.measure(ModelShape(8, 2, 24, 4), "tensor", Ranks(0, 1, "cpu", True))
    assert (row["exact"], row["largest_error"]) == (False, math.inf)
