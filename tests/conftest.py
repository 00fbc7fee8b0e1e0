"""A stricter world than a user's: CPU only, several devices, offline, the same seed for each test.

Nothing here imports torch or jax, so that the tests of the source half run without them.
"""

import gc
import os
import random
import sys

import pytest
from _pytest.unraisableexception import gc_collect_iterations_key
from hypothesis import settings

from benchmarks.newer_versions import without_emitters
from tests.choosing import covered

# jax reads these once, when it is first imported.
os.environ["JAX_PLATFORMS"] = "cpu"
_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    # XLA's optimisations are not under test: without its newer emitters of loops and with one LLVM
    # module a program, compiling takes four tenths of its time. tests/exactness has the emitters.
    *without_emitters(),
    "--xla_cpu_parallel_codegen_split_count=1",
)
os.environ["XLA_FLAGS"] = " ".join((os.environ.get("XLA_FLAGS", ""), *_FLAGS)).strip()
# Nor are LLVM's, which take half of the suite's time.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# The threads of torch's operations wait for one another in a loop, which costs ten times the work
# of a small operation where another process has the second core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A test that needs a download is a test that fails somewhere else.
os.environ["HF_HUB_OFFLINE"] = "1"

# Examples that change from run to run would make an unrelated change fail; the first call of a
# jitted function is far slower than the others, so a deadline would only measure compilation.
settings.register_profile("tpuport", deadline=None, derandomize=True)
settings.load_profile("tpuport")

# What is imported and collected stays, and looking through it for garbage again and again took a
# quarter of the time of collecting. `gc.freeze()` would hide it from `gc.get_objects()`, which the
# package looks for functions with.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    # At its end pytest collects garbage five times, so that what objects raise when they go is
    # told. With all that a process has by then that takes two seconds each time.
    config.stash[gc_collect_iterations_key] = 1


def pytest_collection_finish() -> None:
    gc.enable()
    # With all that is imported a full collection takes 0.3 s, and they took a twentieth of the time
    # of tests/model/test_blocks.py. Of 20,000 new objects hardly any are garbage in cycles.
    gc.set_threshold(20_000, 10, 10)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    left_out = covered()
    for item in items:
        if item.nodeid in left_out:
            item.add_marker(pytest.mark.covered)
    # For tracebacks that nobody reads, pytest would parse each file of jax and torch in them. That
    # took a third of the time of model/test_lowerings.py.
    for item in items:
        if item.get_closest_marker("xfail") is not None:
            item.repr_failure = _exception_only


def _exception_only(excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
    return excinfo.exconly()


@pytest.fixture(scope="session", autouse=True)
def _one_context_of_mlir_for_many_programs() -> None:
    """Share what jax makes for each program: it takes a tenth of the time of compiling a small one.

    A context keeps constants and places in files, so that a new one follows now and then.
    """
    if "jax" not in sys.modules:
        return
    from jax._src.interpreters import mlir

    make, contexts = mlir.make_ir_context, []

    def shared() -> object:
        if not contexts or contexts[1] == 100:
            contexts[:] = [make(), 0]
        contexts[1] += 1
        return contexts[0]

    mlir.make_ir_context = shared


@pytest.fixture(autouse=True)
def _same_seed_for_each_test() -> None:
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        # torch.manual_seed formats its stack for each accelerator that is not there.
        sys.modules["torch"].default_generator.manual_seed(0)
    # A test that shows how a tracer leaks into torchax's key leaves it there.
    env = getattr(sys.modules.get("torchax"), "_env", None)
    if env is not None:
        env.manual_seed(0)
