"""Without overlap each collective is waited for where it starts, and only inside the block."""

from actmem.parallel import linear
from actmem_course.bench.overlap import without_overlap

STARTED = ("start_all_gather", "start_reduce_scatter", "start_all_reduce")


class Started:
    def __init__(self, name, waited):
        self.name, self.waited = name, waited

    def wait(self):
        self.waited.append(self.name)


def test_every_collective_is_waited_for_at_once(monkeypatch):
    waited = []
    for name in STARTED:
        monkeypatch.setattr(linear, name, lambda x, tp, name=name: Started(name, waited))
    with without_overlap():
        for number, name in enumerate(STARTED):
            assert getattr(linear, name)(None, None).name == name
            assert waited == list(STARTED[: number + 1])
    linear.start_all_gather(None, None)
    assert len(waited) == 3
