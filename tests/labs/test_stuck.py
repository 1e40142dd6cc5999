"""Whatever an answer does to its process is its own verdict, which says where; the other exercises are judged."""

import json
import re

import pytest

from tests.labs.learners import learner_file, start

LAB1, LAB3 = "lab1_count_bytes", "lab3_sequence_parallel"
RANK_1 = "if dist.get_rank() == 1:\n        "
GATHER = "\n    y = x.new_empty(2 * x.shape[0], *x.shape[1:])\n    dist.all_gather_into_tensor(y, x.contiguous(), group=group)\n    return y"
LOOP, ENDS = "while True:\n            pass", "import ctypes\n        ctypes.CDLL(None)._exit"
PLACE = r"lab\d_\w+\.py:\d+"
#: By lab and function: a body, and status and words of its verdict.
ANSWERS = {
    LAB1: {
        "layer_bytes": ("import ctypes\n    ctypes.string_at(0)", "wrong", f"it died: ended by SIGSEGV, at {PLACE}, in layer_bytes"),
        "rank_bytes": ("while True:\n        pass", "wrong", f"no end after 3 s: rank 0 is at {PLACE}, in rank_bytes"),
        "gated_mlp_bytes": ("import time\n    time.sleep(1)\n    return 3", "wrong", f"too slow, not done after 3 s: rank 0 is at {PLACE}, in gated_mlp_bytes"),
        "crossover_seq_length": ("breakpoint()", "error", r"“breakpoint\(\)” raises RuntimeError: no debugger can be used here"),
    },
    LAB3: {
        "g": (RANK_1 + LOOP + GATHER, "wrong", f"no end after 3 s: rank 1 is at {PLACE}, in g"),
        "g_bar": (RANK_1 + "dist.recv(x, 0)" + GATHER, "wrong", rf"deadlock: rank 0 is waiting in all_gather \({PLACE}\); rank 1 is waiting in receive \({PLACE}\)"),
        "gathering_linear": ("return F.linear(g(x, group), weight, bias)", "blocked", r"by 3\.1 \(g\)"),
        "shard_keeping_linear": (RANK_1 + f"{ENDS}(3)", "wrong", "it died: exit code 3"),
        "sum_partial_gradients": (RANK_1 + f"{ENDS}(0)", "wrong", "it died: it ended the process by itself, with exit code 0 and without a verdict"),
        "dropout_generators": (RANK_1 + "import os\n        os._exit(0)", "error", r"on rank 1: “os\._exit\(0\)” raises SystemExit: 0"),
    },
}  # fmt: skip


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    ("lab", "options"), [(LAB1, ()), (LAB3, ("--only", "3.1,3.2,3.3,3.5,3.6,3.7", "--ranks", "2"))]
)
def test_what_ends_or_stops_the_process_is_told_apart_and_the_others_are_judged(lab, options, tmp_path):
    path = tmp_path / "verdicts.json"
    file = learner_file(tmp_path, lab, seconds=3, **{name: body for name, (body, *_) in ANSWERS[lab].items()})
    done = start(file, "--json", str(path), *options)
    found = {v["function"]: v for v in json.loads(path.read_text())["verdicts"]}
    assert found.keys() == ANSWERS[lab].keys() and done.returncode == 1 and "Traceback" not in done.stdout
    for name, (_, status, words) in ANSWERS[lab].items():
        assert found[name]["status"] == status and re.search(words, found[name]["diagnosis"]), found[name]
