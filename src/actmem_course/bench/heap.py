"""Keep freed memory in the process, so that a layer's time does not include fetching it again.

The C library returns large blocks to the system when they are freed; the next tensor then gets new
pages, each cleared first.  How often this happens depends on the order of frees, which differs
between recomputation modes, and the effect is large enough to hide the difference between them.
GPU allocators keep freed memory, and so do the CPU allocators that training runs use.
"""

from __future__ import annotations

import ctypes
import sys

#: glibc's mallopt: the size from which a block gets a system call of its own, and how much may stay free at the heap's end.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
#: The largest value that glibc accepts for the first; larger blocks are still returned.
_LARGEST_KEPT_BLOCK = 32 << 20


def keep_freed_memory() -> bool:
    """Make the C library keep what this process frees.  False if malloc can't be configured (not glibc)."""
    if sys.platform != "linux":
        return False
    try:
        tune = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(tune(_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK) and tune(_TRIM_THRESHOLD, 2**31 - 1))
