"""Keep the memory that a batch needs from batch to batch."""

import ctypes
import sys

#: Parameters of glibc's `mallopt`.
M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3


def keep_freed_memory() -> None:
    """Let this process keep the memory that it frees, if its C library is glibc.

    By default, glibc returns large tensors to the kernel, and the next batch gets new pages, which
    the kernel clears. This takes up to a sixth of a training step on a CPU.
    """
    if sys.platform == "linux":
        library = ctypes.CDLL(None)
        if hasattr(library, "mallopt"):  # musl has none
            library.mallopt(M_MMAP_THRESHOLD, 2**30)
            library.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
