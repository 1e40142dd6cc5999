"""Times in turns: what is run when, what counts, and what noisy medians can say.  No test waits for a clock."""

import gc

import pytest

from actmem_course.lab_tools import timing


class Steps:
    """Candidates that only note what runs, on a clock that moves by itself: 1 s a reading."""

    def __init__(self, names):
        self.log = []
        self.work = {name: self._work(name) for name in names}

    def _work(self, name):
        def note(what):
            return lambda *_: self.log.append((name, what))

        return timing.Work(note("forward"), note("backward"), note("finish"))


@pytest.fixture
def ticking(monkeypatch):
    readings = iter(range(10**6))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(readings)))


def test_every_round_runs_every_candidate_once_in_an_order_of_its_own():
    steps = Steps("abcdef")
    samples = timing.take_turns(steps.work, rounds=8, warm_up=3)
    assert {name: len(of_one) for name, of_one in samples.items()} == dict.fromkeys("abcdef", 8)
    assert [what for _, what in steps.log] == ["forward", "backward", "finish"] * (6 * 11)
    order = [name for name, what in steps.log if what == "forward"]
    rounds = [tuple(order[i : i + 6]) for i in range(0, len(order), 6)]
    assert all(sorted(one) == list("abcdef") for one in rounds) and len(set(rounds)) > 5
    again = Steps("abcdef")
    timing.take_turns(again.work, rounds=8, warm_up=3)
    assert again.log == steps.log  # on every rank the same, or collectives would not meet


def test_warm_up_does_not_count_and_parts_add_up(ticking):
    seen = []
    samples = timing.take_turns(Steps("ab").work, rounds=2, warm_up=1, on_round=seen.append)
    assert samples == {name: [timing.Sample(1.0, 1.0)] * 2 for name in "ab"}
    assert samples["a"][0].seconds == 2.0 and seen == [1, 2, 3]


def test_ranks_meet_before_each_step():
    met = []
    steps = Steps("ab")
    timing.take_turns(steps.work, rounds=2, warm_up=0, meet=lambda: met.append(len(steps.log)))
    assert met == [0, 3, 6, 9]


def test_garbage_is_collected_between_rounds_only_and_as_before_afterwards():
    states = []
    work = {"a": timing.Work(lambda: states.append(gc.isenabled()), lambda _: None)}
    assert gc.isenabled()
    timing.take_turns(work, rounds=2)
    assert states == [False] * 4 and gc.isenabled() and gc.get_freeze_count() == 0
    with pytest.raises(ZeroDivisionError):
        timing.take_turns({"a": timing.Work(lambda: 1 / 0, lambda _: None)}, rounds=1)
    assert gc.isenabled()


# What noisy samples say


def over(ratios):
    return timing.over(ratios, [1.0] * len(ratios))


def test_a_ratio_and_its_spread():
    assert (over([3.0])["value"], over([3.0])["low"], over([3.0])["high"]) == (2, 2, 2)
    # Of nine samples the true median lies outside the second and eighth with probability 2 · 10 / 512.
    found = over([*range(9)])
    assert (found["value"], found["low"], found["high"], found["margin"], found["within"]) == (3, 0, 6, 3, 6)
    assert timing.over([2.0, 30.0, 4.0], [1.0, 10.0, 2.0])["value"] == 1.0  # each by the base of its own round


def test_only_what_stands_out_of_the_noise_is_real():
    steady = [1.05, 1.051, 1.049, 1.05, 1.05, 1.05]
    assert over(steady)["is_real"]
    assert over([2 - ratio for ratio in steady])["is_real"]  # faster than the base is real too
    assert not over(steady[:5])["is_real"]  # too few to say
    assert not over([1.05, 1.2, 0.9, 1.05, 1.1, 0.95])["is_real"]  # its own interval holds 1
    assert not over([1.01, 1.01, 1.05, 1.05, 1.4, 1.4])["is_real"]  # ±20% around 5%
