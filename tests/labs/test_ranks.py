"""Starting as a rank: what is refused before any process group exists; what ranks say comes back as it was."""

import argparse
import os
import pickle
import subprocess
import sys
from datetime import timedelta
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist

from actmem.config import ConfigError
from actmem_course.arguments import add_rank_arguments
from actmem_course.rank_store import BadMessage, RankStore, decoded, encoded
from actmem_course.ranks import check_ranks, served_store


def parse(*arguments):
    parser = argparse.ArgumentParser()
    add_rank_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_more_ranks_than_gpus(monkeypatch, two_gpus):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="device: 4 processes on this host but 2 GPUs: start 2, or add --device cpu"):
        check_ranks(parse("--device", "cuda"), "x.py")
    for args in (parse(), parse("--device", "cpu")):
        assert (check_ranks(args, "x.py"), args.device) == (4, "cpu")


def test_two_hosts_count_their_own_gpus(monkeypatch, two_gpus):
    """Where they are too few, the other may have enough: then this one can't choose the CPU alone."""
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    args = parse()
    assert (check_ranks(args, "x.py"), args.device) == (4, "cuda")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match="device: 3 processes on this host but 2 GPUs"):
        check_ranks(parse(), "x.py")


@pytest.mark.parametrize(("own", "expected"), [(None, "1"), ("8", "8")])
def test_collectives_start_in_the_order_of_the_code_on_a_gpu(own, expected):
    """CUDA reads the variable when it is first used, so it is there as soon as a lab has imported the course."""
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_DEVICE_MAX_CONNECTIONS"}
    environment |= {"CUDA_DEVICE_MAX_CONNECTIONS": own} if own else {}
    code = "import actmem_course, os; print(os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == expected


VALUES = [
    None,
    True,
    12345678901234567890,
    0.1 + 0.2,
    float("inf"),
    "§ ünï \n",
    [1, (2, [3.5, None]), {"a": (1,), (2, "b"): {1, 2}}, frozenset({"x"})],
    [{"kind": "F", "kept_bytes": 10, "over": None}],
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_values_come_back(value):
    again = decoded(encoded(value))
    assert again == value and type(again) is type(value)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("sizes", [(), (0, 3), (3, 4)])
def test_tensors_come_back_to_the_bit(dtype, sizes):
    value = torch.randint(0, 255, sizes).to(dtype)
    for one in (value, value.t().contiguous().t() if len(sizes) == 2 else value):
        again = decoded(encoded([one]))[0]
        assert again.dtype == dtype and again.shape == one.shape and torch.equal(again, one)


RAN = []


class Attack:
    def __reduce__(self):
        return RAN.append, ("code from the store",)


@pytest.mark.parametrize("message", [pickle.dumps(Attack()), b"", encoded(Fraction(1, 2)), encoded(1)[:-1]])
def test_nothing_else_is_read(message):
    with pytest.raises(BadMessage) as error:
        decoded(message)
    assert "\n" not in str(error.value) and not RAN


def test_what_a_stranger_posts_is_not_run():
    with served_store() as (host, port):
        assert host == "127.0.0.1"
        options: dict[str, Any] = {"timeout": timedelta(seconds=60), "wait_for_workers": False}
        ours, strangers = (dist.TCPStore(host, port, None, False, **options) for _ in range(2))
        strangers.set("1/0", pickle.dumps(Attack()))  # type: ignore[arg-type]
        with pytest.raises(BadMessage):
            RankStore(1, 2, ours).gather(None)
    assert not RAN
