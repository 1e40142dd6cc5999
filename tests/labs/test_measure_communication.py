"""measure_communication as a user starts it: every exchange as the formula has it; times are never judged."""

import json

import torch

from actmem.config import ModelShape
from actmem.layers.transformer import TransformerLayer
from actmem.measure.emulate import emulated_rank
from actmem.parallel import linear
from actmem.parallel.groups import tensor_parallel
from actmem_course.bench import measure_communication as communication
from actmem_course.bench.measure_communication import count_exchanges, measure_sent
from actmem_course.ranks import Ranks
from tests.labs.in_process import shown_in_80_columns

SCRIPT = "measure_communication.py"
SHAPE = ModelShape(16, 1, 32, 4)
TINY = ["--seq-length", 16, "--micro-batch-size", 1, "--hidden-size", 32, "--num-attention-heads", 4, "--rounds", 1]


def test_under_torchrun(tmp_path):
    path = tmp_path / "exchanges.json"
    shown = shown_in_80_columns(SCRIPT, *TINY, "--json", path, processes=2)
    assert "Every number, kind and byte agrees" in shown and "over gloo is an all-reduce that forgets the rest" in shown
    lines = json.loads(path.read_text())
    sent = [line for line in lines if "on_sockets" in line]
    compared = [line for line in lines if "comparison" in line]
    counted = [line for line in lines if "recompute" in line]
    assert [line["measured"] for line in counted[:1]] == [{"all-reduce": 4}]
    assert all(line["measured"] == line["predicted"] for line in counted) and len(counted) == 12
    assert (
        all(line["sent_bytes"] == line["predicted_bytes"] + line["header_bytes"] > 0 for line in sent)
        and len(sent) == 7
    )
    assert [line["comparison"] for line in compared] == ["Same bytes"]
    assert compared[0]["first_seconds"] > 0 and compared[0]["second_seconds"] > 0


class Alike(Ranks):
    """Ranks that all say the same."""

    def gather(self, value):
        return [value] * self.size


def test_a_byte_more_on_the_sockets_is_named(monkeypatch, capsys):
    monkeypatch.setattr(communication, "can_count", lambda: True)
    monkeypatch.setattr(communication, "bytes_sent_by", lambda run: 1)
    with emulated_rank(2):
        sent = measure_sent(SHAPE, Alike(0, 2, "cpu", False), torch.float32)
    assert not any(one.exact for one in sent)
    assert sent[0].difference == "all-reduce: 4,096 + 1,152 bytes by formula, 2 on the sockets"


def test_emulated_fits_eighty_columns_and_times_nothing():
    shown = shown_in_80_columns(SCRIPT, "--emulate", 8, "--model", "1T")
    assert "nothing is timed" in shown and "Every number, kind and byte agrees" in shown


def test_one_exchange_more_is_seen(monkeypatch):
    class Chatty(TransformerLayer):
        def forward(self, x):  # type: ignore[override]  # called with x alone
            return linear.all_reduce(super().forward(x).detach(), tensor_parallel()) * x

    monkeypatch.setattr(communication, "TransformerLayer", Chatty)
    with emulated_rank(2):
        counted = count_exchanges(SHAPE, Ranks(0, 2, "cpu", True), torch.float32)
    assert not any(one.exact for one in counted)
