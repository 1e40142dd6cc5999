"""What the tools ask a GPU, with a stand-in for CUDA: its clock of events, and its allocator's counters."""

import torch

from actmem_course.lab_tools import held_bytes
from actmem_course.lab_tools.timing import Work, take_turns


class StandIn:
    """What of torch.cuda the clock and the peak call: a clock of events, and counters of bytes."""

    def __init__(self, monkeypatch):
        self.now, self.log = 0.0, []
        outer = self

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                outer.now += 1
                self.at = outer.now

            def elapsed_time(self, end):
                return 1000 * (end.at - self.at)  # milliseconds

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: self.log.append("wait"))
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 1000)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: self.log.append("reset"))
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 5000)


def test_cuda_events_and_one_step_ahead(monkeypatch):
    cuda = StandIn(monkeypatch)
    work = Work(*(lambda *_, what=what: cuda.log.append(what) for what in ("forward", "backward", "finish")))
    samples = take_turns({"a": work}, rounds=1, warm_up=0, device="cuda")
    assert cuda.log == ["wait", "forward", "backward", "finish", "forward", "backward", "wait", "finish"]
    assert [(sample.forward_seconds, sample.backward_seconds) for sample in samples["a"]] == [(1.0, 1.0)]


def test_cuda_memory_is_the_allocators(monkeypatch):
    cuda = StandIn(monkeypatch)
    runner = held_bytes.Runner(torch.nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True))
    assert held_bytes._allocator_peak(runner) == 4000 and cuda.log.count("reset") == 1
