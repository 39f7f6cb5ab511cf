"""Memory of large CPU tensors: a caching allocator for what fusible makes, and an offer to tune the C library's.

A fresh large CPU tensor costs more than the arithmetic on it, since the system hands its pages out one fault at a time
and takes them back when it dies. Results of at least 1 MiB therefore come from a cache, as on a GPU: outputs,
gradients, intermediates and what is kept for backward. Such tensors behave as any other (views, numpy, saving,
pickling, sharing, outliving everything) but for one thing: they cannot be grown by `resize_`, which raises
`RuntimeError`. `pool_outputs(False)` turns the cache off. The profiler's memory view does not see them; `stats` does.

Without the C++ kernels (`fusible.info()`) there is no cache: everything here works, and changes nothing. More in
docs/memory.md.
"""

from __future__ import annotations

import ctypes
import platform
from typing import NamedTuple

import torch

from fusible.kernels import library

__all__ = ["Stats", "empty_cache", "limit", "pool_outputs", "stats", "tune_malloc"]

_FROM = 1 << 20
_NEVER = 1 << 62
#: Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_NO_TRIM = -1


class Stats(NamedTuple):
    """What the cache does, in bytes of whole blocks: held by tensors, held for the next one, the most held by tensors,
    the limit of what is held for the next one. `hits` and `misses` count allocations from the cache and from the
    system, since the process began."""

    in_use: int = 0
    cached: int = 0
    peak: int = 0
    hits: int = 0
    misses: int = 0
    limit: int = 0


def stats() -> Stats:
    """The cache's figures; zeros where there is none."""
    return Stats(*torch.ops.fusible.stats()) if library.load() else Stats()


def limit(nbytes: int) -> None:
    """Lets the cache hold at most this many bytes that no tensor uses, 1 GiB at first; gives back at once what is more.

    Raises `ValueError` if negative.
    """
    if nbytes < 0:
        raise ValueError(f"memory.limit({nbytes}): the limit must not be negative; 0 caches nothing")
    if library.load():
        torch.ops.fusible.set_limit(nbytes)


def empty_cache() -> None:
    """Gives what is cached and unused back to the system."""
    if library.load():
        torch.ops.fusible.empty_cache()


def pool_outputs(on: bool) -> None:
    """Whether large results come from the cache, as they do at first, or all from torch's allocator.

    Tensors that are there stay what they are.
    """
    if library.load():
        torch.ops.fusible.set_pool_from(_FROM if on else _NEVER)


def tune_malloc() -> None:
    """Lets the C library keep freed memory, for the whole process, so that plain PyTorch reuses large tensors' memory.

    Raises glibc's `M_MMAP_THRESHOLD` to 2 GiB and turns trimming off; docs/memory.md has what that brings. It cannot be
    undone, and memory that was used once stays with the process. Raises `RuntimeError` where the C library is not
    glibc.
    """
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        raise RuntimeError(
            f"memory.tune_malloc() needs Linux with glibc, this is {platform.system()} with "
            f"{platform.libc_ver()[0] or 'another C library'}; fusible's own cache works without it"
        )
    libc = ctypes.CDLL(None)
    # An older glibc refuses thresholds above 32 MiB; then no block at all is mapped by itself.
    kept = libc.mallopt(_M_MMAP_THRESHOLD, 2**31 - 1) or libc.mallopt(_M_MMAP_MAX, 0)
    if not (kept and libc.mallopt(_M_TRIM_THRESHOLD, _NO_TRIM)):
        raise RuntimeError("memory.tune_malloc(): glibc refused the thresholds; nothing was gained")
