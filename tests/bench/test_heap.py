"""Freed memory stays with the process."""

import subprocess
import sys

import pytest

#: MiB that are still resident after 160 MiB were freed, in a process of its own: what is told to the C library stays told.
RESIDENT = """
import re, sys, torch
from actmem_course.bench.heap import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
resident = lambda: int(re.search(r"VmRSS:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) >> 10
before = resident()
tensors = [torch.ones(2**21) for _ in range(20)]
assert resident() - before > 150
del tensors
print(resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's setting")
def test_freed_memory_stays():
    left = {
        how: int(
            subprocess.run([sys.executable, "-c", RESIDENT, how], capture_output=True, text=True, check=True).stdout
        )
        for how in ("keep", "not")
    }
    assert left["not"] < 30 and left["keep"] > 130
