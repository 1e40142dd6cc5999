"""The trace is JSON that Perfetto opens, and the paper's names are on it only while it is recorded."""

import json

import torch

from actmem.config import ModelShape
from actmem.layers.transformer import TransformerLayer
from actmem.ledger.emulate import emulated_rank
from actmem.parallel import conjugates, linear
from actmem.parallel.groups import tensor_parallel
from actmem_course.lab_tools.held_bytes import Runner
from actmem_course.lab_tools.trace import write_trace

SHAPE = ModelShape(8, 1, 16, 4)


def ranges(path, run):
    """Names of ranges by the run that they lie in."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("cat") == "user_annotation"]
    (outer,) = (e for e in events if e["name"] == run)
    return {e["name"] for e in events if outer["ts"] <= e["ts"] <= outer["ts"] + outer["dur"]}


def test_the_papers_names(tmp_path):
    before = conjugates.FUNCTIONS["g"].backward, linear.start_all_gather
    with emulated_rank(2, real_tensors=True):
        work = {}
        for name, sequence, mode in (("TP", False, "full"), ("SP", True, "selective")):
            layer = TransformerLayer(
                SHAPE, tensor_parallel(sequence_parallel=sequence), recompute=mode, dtype=torch.float32
            )
            work[name] = Runner(layer, torch.randn(8 // (1 + sequence), 1, 16, requires_grad=True)).work()
        write_trace(work, tmp_path / "trace.json", "cpu")
    tensor, sequence = (ranges(tmp_path / "trace.json", run) for run in ("TP", "SP"))
    assert {"forward", "backward", "f_bar: all-reduce", "f backward: start all-reduce", "layer recompute"} <= tensor
    assert {
        "g: all-gather",
        "g_bar: reduce-scatter",
        "g backward: start reduce-scatter",
        "core attention recompute",
    } <= sequence
    assert not tensor & {"g: all-gather", "core attention recompute"} and "layer recompute" not in sequence
    assert (conjugates.FUNCTIONS["g"].backward, linear.start_all_gather) == before
