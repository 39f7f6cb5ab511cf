"""The caching allocator of the C++ kernels, from outside: threads, forks, what tensors of its memory can do, bounds.

No rows: these tests are about memory, not about any op's numbers.
"""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import os
import pickle
import platform
import subprocess
import sys
import textwrap
import threading

import numpy
import pytest
import torch

import fusible
from fusible import memory, ops
from fusible.kernels import library

pytestmark = pytest.mark.skipif(not library.load(), reason=f"the C++ kernels are {library.why_not()}")

MIB = 1 << 20
SANITIZED = "asan" in os.environ.get("LD_PRELOAD", "")
linux = pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc")


@pytest.fixture(autouse=True)
def fresh():
    """An empty cache with the limit it starts with; afterwards nothing is in use that was not before."""
    gc.collect()
    before = memory.stats()
    memory.empty_cache()
    yield
    gc.collect()
    memory.limit(before.limit)
    memory.pool_outputs(True)
    assert memory.stats().in_use == before.in_use


def pooled(mib: float = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor of the cache's memory."""
    return torch.ops.fusible.empty.default([int(mib * MIB) // dtype.itemsize], dtype)


def run(code: str, **environment: str) -> str:
    """The output of a Python process that ends well and says nothing on stderr."""
    prelude = "import torch\nfrom fusible import memory\nfrom fusible.kernels import library\nassert library.load()\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


# -- what it does ------------------------------------------------------------------------------------------------------


def test_memory_comes_back_and_is_handed_out_again():
    before = memory.stats()
    t = pooled(4)
    place = t.data_ptr()
    view = t[5:].view(-1)
    del t
    assert memory.stats().cached == 0, "the view holds it"
    del view
    assert memory.stats().cached == 4 * MIB
    again = pooled(4)
    after = memory.stats()
    assert again.data_ptr() == place
    assert (after.hits - before.hits, after.misses - before.misses, after.cached) == (1, 1, 0)
    assert after.peak >= after.in_use == before.in_use + 4 * MIB


@pytest.mark.parametrize("mib", [1, 1.1, 1.3, 1.6, 1.9, 2, 2.01, 3.99, 5, 9, 33])
def test_size_classes_waste_a_quarter_at_most_and_powers_of_two_nothing(mib):
    before = memory.stats().in_use
    t = pooled(mib)
    block = memory.stats().in_use - before
    assert t.nbytes <= block <= 1.25 * t.nbytes
    assert block == t.nbytes or mib not in (1, 2)
    assert t.data_ptr() % (2 * MIB if block >= 2 * MIB else 4096) == 0


def test_small_tensors_come_from_torch():
    before = memory.stats()
    t = pooled(0.99)
    assert memory.stats() == before
    t.resize_(2 * MIB)


@linux
def test_large_blocks_are_huge_pages_where_the_system_offers_them():
    with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
        if "[never]" in file.read():
            pytest.skip("the system offers none")
    t = pooled(8).fill_(1)
    with open("/proc/self/smaps") as file:
        advised = file.read().split(f"{t.data_ptr():x}-")[1].partition("VmFlags:")[2].partition("\n")[0]
    assert "hg" in advised.split()


def test_the_cache_is_bounded():
    memory.limit(6 * MIB)
    tensors = [pooled(2) for _ in range(5)] + [pooled(1) for _ in range(5)]
    assert memory.stats().cached == 0
    tensors.clear()
    assert 4 * MIB <= memory.stats().cached <= 6 * MIB
    memory.limit(3 * MIB)
    assert memory.stats().cached <= 3 * MIB
    memory.empty_cache()
    assert memory.stats().cached == 0


def test_a_limit_of_nothing_caches_nothing():
    memory.limit(0)
    for _ in range(3):
        misses = memory.stats().misses
        t = pooled().fill_(1)
        del t
        assert memory.stats().cached == 0
        assert memory.stats().misses == misses + 1
    with pytest.raises(ValueError, match=r"^memory\.limit\(-1\): the limit must not be negative; 0 caches nothing$"):
        memory.limit(-1)
    assert memory.stats().limit == 0


def test_pool_outputs_off_leaves_all_to_torch():
    block, x = fusible.Sequential(ops.RMSNorm(512)), torch.randn(1024, 512, requires_grad=True)
    before = memory.stats()
    with torch.no_grad():
        y = block(x)
        assert memory.stats().in_use - before.in_use >= y.nbytes
        memory.pool_outputs(False)
        before = memory.stats()
        y = block(x)
    assert memory.stats().in_use < before.in_use + y.nbytes
    y.resize_(4096, 512)


def test_what_no_system_can_give_is_an_error_and_leaves_no_trace():
    before = memory.stats()
    with pytest.raises(RuntimeError, match=r"fusible: out of memory: the system does not give \d+ bytes"):
        torch.ops.fusible.empty.default([1 << 58], torch.float32)
    after = memory.stats()
    assert (after.in_use, after.peak) == (before.in_use, before.peak)
    assert pooled().fill_(1).sum() == MIB // 4


# -- tensors of its memory ---------------------------------------------------------------------------------------------


def test_growing_is_the_one_thing_that_fails():
    t = pooled(4).fill_(3)
    message = "Trying to resize storage that is not resizable"
    with pytest.raises(RuntimeError, match=message):
        t.resize_(2 * MIB)
    with pytest.raises(RuntimeError, match=message):
        t.untyped_storage().resize_(0)
    t.resize_(7)
    assert t.tolist() == [3.0] * 7
    t.resize_(MIB)
    assert bool((t == 3).all())


def test_saving_pickling_copying():
    t = pooled().normal_()
    file = io.BytesIO()
    torch.save({"whole": t, "part": t[3:9]}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["whole"], t)
    assert torch.equal(loaded["part"], t[3:9])
    for other in (pickle.loads(pickle.dumps(t)), copy.deepcopy(t), t.clone()):
        assert torch.equal(other, t)
        assert other.data_ptr() != t.data_ptr()
        other.resize_(2 * MIB)


def test_views_of_other_libraries_outlive_the_tensor():
    t = pooled().fill_(7)
    array, capsule = t.numpy(), torch.utils.dlpack.to_dlpack(t)
    del t
    other = pooled().fill_(1)
    assert (array == 7).all()
    imported = torch.from_dlpack(capsule)
    del capsule, array
    assert bool((imported == 7).all())
    assert bool((other == 1).all())
    assert memory.stats().cached == 0


def test_sharing_moves_it_to_shared_memory():
    t = pooled().fill_(2)
    t.share_memory_()
    assert t.is_shared()
    assert memory.stats().cached == MIB
    assert bool((t == 2).all())


def double(queue, results):
    t = queue.get()
    results.put(t.mul_(2).sum().item())


def test_sending_to_another_process():
    context = multiprocessing.get_context("spawn")
    queue, results = torch.multiprocessing.get_context("spawn").Queue(), context.Queue()
    child = context.Process(target=double, args=(queue, results))
    child.start()
    t = pooled().fill_(2)
    queue.put(t)
    assert results.get(timeout=60) == MIB
    child.join()
    assert bool((t == 4).all()), "both see one memory, as with any tensor that is sent"


def test_tensors_may_be_alive_when_python_ends():
    code = """
        import atexit, sys
        t = torch.ops.fusible.empty.default([1 << 20], torch.float32).fill_(1)
        cycle = [torch.ops.fusible.empty.default([1 << 20], torch.float32)]
        cycle.append(cycle)
        sys.kept = t[1:]
        atexit.register(lambda: print(int(t.sum())))
    """
    assert run(code) == str(MIB)


# -- threads, forks, exceptions, time ----------------------------------------------------------------------------------


def test_threads_never_get_the_same_memory():
    wrong = []

    def work(number: int) -> None:
        held: list[torch.Tensor] = []
        for turn in range(300):
            held.append(pooled(1 + (number + turn) % 3).fill_(number * 1000 + turn))
            if len(held) > 3:
                t = held.pop(turn % 3)
                if not bool((t == t[0]).all()) or int(t[0]) // 1000 != number:
                    wrong.append((number, turn))

    memory.limit(8 * MIB)
    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert memory.stats().cached <= 8 * MIB


def test_a_tensor_may_die_in_another_thread():
    before = memory.stats().in_use
    box = [pooled(2).fill_(1)]
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert memory.stats().in_use == before
    assert memory.stats().cached == 2 * MIB


@linux
def test_a_child_goes_on_with_its_copy():
    """Forked while other threads are in the allocator, many times; the child uses the pool and both go on."""
    code = """
        import os, threading
        torch.set_num_threads(1)
        empty = torch.ops.fusible.empty.default
        stop = []
        def work():
            while not stop:
                empty([1 << 18], torch.float32)
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads: thread.start()
        held = empty([1 << 18], torch.float32).fill_(5)
        for turn in range(50):
            child = os.fork()
            if child == 0:
                good = bool((held == 5).all())
                fresh = empty([1 << 18], torch.float32).fill_(turn)
                held.fill_(turn)
                del fresh
                memory.empty_cache()
                good = good and memory.stats().in_use >= 1 << 20
                os._exit(0 if good else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert bool((held == 5).all())
        stop.append(1)
        for thread in threads: thread.join()
        print("done")
    """
    assert run(code, PYTHONWARNINGS="ignore") == "done"


def test_an_exception_inside_a_block_frees_what_was_made():
    class Fails(fusible.Op):
        def reference(self, x):
            return x * 1

        def fwd(self, x):
            raise ArithmeticError("here")

        def bwd(self, saved, dy):
            return fusible.Grads(dy)

    block = fusible.Sequential(ops.RMSNorm(512), Fails())
    before = memory.stats().in_use
    for _ in range(3):
        with pytest.raises(ArithmeticError, match="here"):
            block(torch.randn(1024, 512))
    gc.collect()
    assert memory.stats().in_use == before


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@linux
def test_a_million_cycles_do_not_grow():
    empty, sizes = torch.ops.fusible.empty.default, [[MIB // 4], [MIB // 2], [MIB // 4 + 5], [1]]
    count = 20_000 if SANITIZED else 250_000
    torch.ops.fusible.set_fill(False)  # a million MiB would take a minute

    def cycles(count: int) -> None:
        for _ in range(count):
            for size in sizes:
                empty(size, torch.float32)

    cycles(count // 4)
    before, memory_before = memory.stats(), resident()
    cycles(count)
    after = memory.stats()
    assert (after.in_use, after.cached, after.peak) == (before.in_use, before.cached, before.peak)
    assert (after.hits - before.hits, after.misses) == (3 * count, before.misses)
    assert SANITIZED or resident() - memory_before < MIB


@linux
def test_training_does_not_grow():
    block = fusible.Sequential(ops.Residual(ops.RMSNorm(512), ops.Linear(512, 1024), ops.GELU(), ops.Linear(1024, 512)))
    x = torch.randn(512, 512, requires_grad=True)

    def step() -> None:
        torch.autograd.grad(block(x).sum(), [x, *block.parameters()])

    for _ in range(3):
        step()
    before = memory.stats()
    for _ in range(10):
        step()
    after = memory.stats()
    assert after.hits > before.hits, "it is used"
    assert (after.in_use, after.cached, after.peak, after.misses) == (
        before.in_use, before.cached, before.peak, before.misses)  # fmt: skip


# -- the C library's own -----------------------------------------------------------------------------------------------


@linux
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can be tuned")
@pytest.mark.skipif(SANITIZED, reason="the sanitizer's malloc is not glibc's")
def test_tuned_malloc_keeps_memory_that_is_freed():
    code = """
        import os
        def resident():
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
        if os.environ["TUNE"] == "1":
            memory.tune_malloc()
        t = torch.ones(64 << 18)
        there = resident()
        del t
        print(there - resident() >= 60)
    """
    assert run(code, TUNE="0") == "True"
    assert run(code, TUNE="1") == "False"


@pytest.mark.parametrize(
    ("system", "libc", "named"),
    [("Darwin", "", "Darwin with another C library"), ("Linux", "musl", "Linux with musl")],
)
def test_elsewhere_tuning_malloc_is_refused(monkeypatch, system, libc, named):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "libc_ver", lambda: (libc, ""))
    with pytest.raises(RuntimeError) as raised:
        memory.tune_malloc()
    assert str(raised.value) == (
        f"memory.tune_malloc() needs Linux with glibc, this is {named}; fusible's own cache works without it"
    )


def test_uninitialised_memory_of_tests_is_nan():
    """In each float type, also where the block was used before: see `strict` in conftest.py."""
    for dtype in library.FLOATS:
        assert bool(pooled(1, dtype).fill_(1).sum() > 0)
        assert bool(pooled(1, dtype).isnan().all())
    assert numpy.isnan(pooled(2).numpy()).all()
