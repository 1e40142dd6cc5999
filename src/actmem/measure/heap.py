"""Freed memory stays with the process, so that a layer's time is not that of fetching memory again.

The C library gives large blocks back to the system when they are freed, and takes new ones, page
by page and each cleared, for the next tensor.  How often depends on the order of what was freed,
which differs between modes of recomputation: enough to hide what they differ in.  GPUs' allocators keep
what is freed, and so do CPU allocators that training runs use.
"""

from __future__ import annotations

import ctypes
import sys

#: glibc's mallopt: where blocks of a system call each begin, and how much may lie free at the heap's end.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
#: The largest that glibc takes for the first; larger blocks are still given back.
_LARGEST_KEPT_BLOCK = 32 << 20


def keep_freed_memory() -> bool:
    """From now on let the C library keep what this process frees.  False where it can't be told so (not glibc)."""
    if sys.platform != "linux":
        return False
    try:
        tune = ctypes.CDLL(None).mallopt
    except AttributeError:  # another C library
        return False
    return bool(tune(_MMAP_THRESHOLD, _LARGEST_KEPT_BLOCK) and tune(_TRIM_THRESHOLD, 2**31 - 1))
