"""Equal programs of one process: compiled once, unless jax keeps programs in a folder."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache

import tpuport
from tpuport.aot.cache import cache_folder, program_memory
from tpuport.aot.cache.compile_cache import CacheReport, watching
from tpuport.aot.cache.program_memory import equal_programs_once, not_from_memory

FOLDER = "jax_compilation_cache_dir"
SHORTEST = "jax_persistent_cache_min_compile_time_secs"


@pytest.fixture(autouse=True)
def all_kept(monkeypatch: pytest.MonkeyPatch):
    """These programs compile too fast to be worth keeping."""
    monkeypatch.setattr(program_memory, "_SECONDS", 0.0)


def hits(count: int, number: float = 2.0) -> list[bool]:
    """Which of some equal functions, each new to jax, were loaded; their results have to agree."""
    given, results = np.arange(8.0, dtype=np.float32), []

    def function() -> Any:
        def program(x):
            return jnp.sin(x * number).sum()

        return jax.jit(program)

    report = CacheReport("")
    with watching(report):
        results = [float(function()(given)) for _ in range(count)]
    assert results == [pytest.approx(np.sin(given * number).sum(), rel=1e-5)] * count
    return [one.hit for one in report.programs if one.name == "program"]


def test_equal_programs_are_compiled_once_and_others_are_not_mixed_up():
    before = getattr(jax.config, FOLDER), getattr(jax.config, SHORTEST)
    with equal_programs_once():
        assert hits(3) == [False, True, True]
        assert hits(2, number=3.0) == [False, True]
        with not_from_memory():
            assert hits(1) == [False]
        assert hits(1) == [True]
    assert (getattr(jax.config, FOLDER), getattr(jax.config, SHORTEST)) == before
    assert compilation_cache._cache is None
    assert hits(2) == [False, False]


def test_the_oldest_programs_make_room(monkeypatch: pytest.MonkeyPatch):
    with equal_programs_once():
        hits(1)
        memory = compilation_cache._cache
        assert isinstance(memory, program_memory._ProgramMemory)
        largest = max(map(len, memory._entries.values()))
        monkeypatch.setattr(program_memory, "_BYTES", 1.5 * largest)
        assert hits(2, number=3.0) == [False, True]
        assert hits(1) == [False]


def test_a_folder_that_the_script_names_is_used_from_then_on(tmp_path: Path):
    before = getattr(jax.config, FOLDER), getattr(jax.config, SHORTEST)
    with equal_programs_once():
        hits(1)
        with tpuport.compile_cache(tmp_path / "ours", max_size=None):
            assert hits(2) == [False, True]
        assert len(cache_folder.entries(tmp_path / "ours")) > 0
    assert (getattr(jax.config, FOLDER), getattr(jax.config, SHORTEST)) == before
    jax.config.update(SHORTEST, 0.0)
    try:
        with equal_programs_once():
            jax.config.update(FOLDER, str(tmp_path / "theirs"))
            assert hits(2, number=4.0) == [False, True]
        assert [e.program for e in cache_folder.entries(tmp_path / "theirs")] == ["jit_program"]
        with equal_programs_once():  # jax's own folder, and nothing of ours
            assert hits(1, number=4.0) == [True]
    finally:
        jax.config.update(FOLDER, before[0])
        jax.config.update(SHORTEST, before[1])
        compilation_cache.reset_cache()
