"""Starting as a rank: what is refused before any process group exists."""

import argparse

import pytest
import torch

from actmem.config import ConfigError
from actmem.lab.ranks import add_rank_arguments, check_ranks


def parse(*arguments):
    parser = argparse.ArgumentParser()
    add_rank_arguments(parser)
    return parser.parse_args(arguments)


@pytest.fixture
def two_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


@pytest.mark.parametrize("arguments", [(), ("--device", "cuda")])
def test_more_ranks_than_gpus(monkeypatch, two_gpus, arguments):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="device: 4 processes on this host but 2 GPUs: start 2, or add --device cpu"):
        check_ranks(parse(*arguments), "x.py")
    assert check_ranks(parse("--device", "cpu"), "x.py") == 4


def test_two_hosts_count_their_own_gpus(monkeypatch, two_gpus):
    for name, value in {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert check_ranks(parse(), "x.py") == 4
