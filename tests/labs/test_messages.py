"""What ranks say to each other comes back as it was, and nothing that is read is run."""

import pickle
from datetime import timedelta
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist

from actmem_course.rank_store import BadMessage, RankStore, decoded, encoded
from actmem_course.results import MemorySample, ParityResult, Sample
from actmem_course.start import served_store

VALUES = [
    None,
    True,
    12345678901234567890,
    0.1 + 0.2,
    float("inf"),
    "§ ünï \n",
    [1, (2, [3.5, None]), {"a": (1,), (2, "b"): {1, 2}}, frozenset({"x"})],
    Sample(0.1, 0.2, 0.3),
    [MemorySample("F", 0, 1, 1, 10, 20, 30)],
    ParityResult("tensor", 2, 0, 0.0, True, {"all-reduce": 4}, {"all-reduce": 4}, []),
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
        ours, strangers = (
            dist.TCPStore(host, port, None, False, timeout=timedelta(seconds=60), wait_for_workers=False)
            for _ in range(2)
        )
        strangers.set("gather/1/0", pickle.dumps(Attack()))  # type: ignore[arg-type]
        with pytest.raises(BadMessage):
            RankStore(1, 2, ours).read("gather/1", 0)
    assert not RAN


def test_two_stores_have_ports_of_their_own():
    with served_store() as first, served_store() as second:
        assert first[1] != second[1]
