"""Reading where a thread is changes nothing for it."""

import threading
import weakref

from actmem_course.judge.frames import places


class Kept:
    pass


def made_and_dropped():
    kept = Kept()
    return weakref.ref(kept)


def test_this_thread_is_read_innermost_first():
    functions = [function for file, line, function in places() if file == __file__]
    assert functions[:1] == ["test_this_thread_is_read_innermost_first"]


def test_nothing_lives_longer_because_another_thread_reads():
    over, read = threading.Event(), []

    def reads():
        while not over.is_set():
            read.append(any(function == "made_and_dropped" for file, line, function in places()))

    thread = threading.Thread(target=reads)
    thread.start()
    alive = sum(made_and_dropped()() is not None for _ in range(1_000_000))
    over.set()
    thread.join()
    assert (alive, any(read)) == (0, True)
