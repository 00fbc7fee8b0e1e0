"""Programs kept for other processes: loaded and not compiled, whole or not at all, limited."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache

import tpuport
from tpuport.aot.cache import cache_folder
from tpuport.aot.cache.compile_cache import CacheRecord, CacheReport
from tpuport.foundation.errors import UsageError

SETTINGS = (
    "jax_enable_compilation_cache",
    "jax_compilation_cache_dir",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_persistent_cache_enable_xla_caches",
    "jax_persistent_cache_min_entry_size_bytes",
    "jax_raise_persistent_cache_errors",
)


def settings() -> dict[str, Any]:
    """What jax is configured to do."""
    return {name: getattr(jax.config, name) for name in SETTINGS}


def run_program(number: float = 2.0) -> float:
    """One program, compiled or loaded: a function that jax has not seen."""

    @jax.jit
    def program(x):
        return jnp.sin(x * number).sum()

    return float(program(np.arange(8.0, dtype=np.float32)))


def kinds(report: CacheReport) -> dict[str, bool]:
    """Whether each program was loaded."""
    return {program.name: program.hit for program in report.programs}


def entry_of(folder: Path, name: str = "jit_program") -> Path:
    """The file of one program."""
    (entry,) = (e for e in cache_folder.entries(folder) if e.program == name)
    return entry.path


def test_a_program_is_compiled_once_and_loaded_from_then_on(tmp_path: Path):
    with tpuport.compile_cache(tmp_path) as cache:
        expected = run_program()
        assert kinds(cache.report)["program"] is False
        first = len(cache.report.programs)
        assert cache.report.misses == first
        assert run_program() == expected
    assert cache.report.hits == len(cache.report.programs) - first == first
    assert cache.report.seconds > 0
    assert cache_folder.is_whole(entry_of(tmp_path))


def test_afterwards_jax_is_as_before(tmp_path: Path):
    before = settings()
    with tpuport.compile_cache(tmp_path / "outer", max_size=None, min_compile_seconds=3.0):
        outer = settings()
        assert outer == {
            "jax_enable_compilation_cache": True,
            "jax_compilation_cache_dir": str(tmp_path / "outer"),
            "jax_compilation_cache_max_size": -1,
            "jax_persistent_cache_min_compile_time_secs": 3.0,
            "jax_persistent_cache_enable_xla_caches": "none",
            "jax_persistent_cache_min_entry_size_bytes": -1,
            "jax_raise_persistent_cache_errors": False,
        }
        with tpuport.compile_cache(tmp_path / "inner"):
            run_program()
        assert settings() == outer
    assert settings() == before
    assert cache_folder.entries(tmp_path / "outer") == []
    kept = cache_folder.entries(tmp_path / "inner")
    run_program(5.0)
    assert cache_folder.entries(tmp_path / "inner") == kept != []


def test_without_a_block_it_stays_until_it_is_closed(tmp_path: Path):
    before = settings()
    cache = tpuport.compile_cache(tmp_path)
    try:
        run_program()
        assert cache_folder.entries(tmp_path)
    finally:
        cache.close()
    assert settings() == before
    counted = len(cache.report.programs)
    run_program()
    assert len(cache.report.programs) == counted


def test_a_folder_of_ones_own_is_for_oneself(tmp_path: Path):
    with tpuport.compile_cache(tmp_path / "a" / "b") as cache:
        assert cache.directory == str(tmp_path / "a" / "b")
    assert not cache_folder.open_to_others(tmp_path / "a" / "b")
    (tmp_path / "a" / "b").chmod(0o777)
    assert cache_folder.open_to_others(tmp_path / "a" / "b")


def test_quick_programs_can_be_left_out(tmp_path: Path):
    with tpuport.compile_cache(tmp_path, min_compile_seconds=1000) as cache:
        run_program()
    assert cache.report.misses
    assert cache_folder.entries(tmp_path) == []


def test_the_least_recently_used_program_makes_room(tmp_path: Path):
    with tpuport.compile_cache(tmp_path, max_size=None):
        run_program()
    size = sum(entry.size for entry in cache_folder.entries(tmp_path))
    with tpuport.compile_cache(tmp_path, max_size=2 * size):
        for number in range(3, 9):
            run_program(float(number))
    kept = cache_folder.entries(tmp_path)
    assert 0 < sum(entry.size for entry in kept) <= 2 * size
    with tpuport.compile_cache(tmp_path, max_size=2 * size) as cache:
        run_program(8.0)
        assert kinds(cache.report)["program"] is True
        run_program(2.0)
        assert kinds(cache.report)["program"] is False


def test_a_folder_filled_without_a_limit_takes_one(tmp_path: Path):
    with tpuport.compile_cache(tmp_path, max_size=None):
        run_program()
    assert not list(tmp_path.glob("*-atime"))
    with warnings.catch_warnings():
        # jax would warn that it cannot write, and keep nothing.
        warnings.simplefilter("error")
        with tpuport.compile_cache(tmp_path):
            run_program(3.0)
    assert len([e for e in cache_folder.entries(tmp_path) if e.program == "jit_program"]) == 2


# Damage.


@pytest.mark.parametrize("left", [0, 10, 0.5])
def test_a_damaged_entry_gives_a_warning_and_the_right_result(tmp_path: Path, left: float):
    with tpuport.compile_cache(tmp_path):
        expected = run_program()
    path = entry_of(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(left * len(whole)) if left < 1 else int(left)])
    assert list(cache_folder.damaged(tmp_path)) == [path]
    with (
        pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"),
        tpuport.compile_cache(tmp_path) as cache,
    ):
        assert run_program() == expected
    assert kinds(cache.report)["program"] is False

    # jax leaves the damaged file where it is.
    assert cache_folder.remove_damaged(tmp_path) == 1
    assert cache_folder.remove_damaged(tmp_path) == 0
    with tpuport.compile_cache(tmp_path) as cache:
        assert run_program() == expected
        assert run_program() == expected
    assert [p.hit for p in cache.report.programs if p.name == "program"] == [False, True]


def test_a_changed_byte_is_noticed(tmp_path: Path):
    with tpuport.compile_cache(tmp_path):
        expected = run_program()
    path = entry_of(tmp_path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x55
    path.write_bytes(data)
    assert list(cache_folder.damaged(tmp_path)) == [path]
    with pytest.warns(UserWarning, match="Error reading"), tpuport.compile_cache(tmp_path):
        assert run_program() == expected


def test_programs_have_check_sums_whatever_is_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    zstandard = pytest.importorskip("zstandard", reason="waits for zstandard, of extra [openpilot]")
    monkeypatch.setattr(compilation_cache, "zstandard", zstandard)
    with tpuport.compile_cache(tmp_path):
        run_program()
    assert entry_of(tmp_path).read_bytes()[0] == 0x78
    assert compilation_cache.zstandard is zstandard
    # What jax writes by itself is another entry, which is not taken for this one.
    packed = compilation_cache.compress_executable(b"a program")
    other = tmp_path / "jit_other-0123-cache"
    other.write_bytes(packed)
    assert cache_folder.is_whole(other)
    other.write_bytes(packed[1:])
    assert not cache_folder.is_whole(other)


@pytest.mark.xfail(reason="jax 0.10.2 asks zstandard for no check sum: compile_cache._check_sums")
def test_jax_itself_notices_a_changed_byte(monkeypatch: pytest.MonkeyPatch):
    zstandard = pytest.importorskip("zstandard", reason="waits for zstandard, of extra [openpilot]")
    monkeypatch.setattr(compilation_cache, "zstandard", zstandard)
    packed = bytearray(compilation_cache.compress_executable(os.urandom(4096)))
    packed[len(packed) // 2] ^= 0x55
    with pytest.raises(zstandard.ZstdError):
        compilation_cache.decompress_executable(bytes(packed))


# The key.


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_other_flags_are_another_program(tmp_path: Path, monkeypatch, variable: str):
    with tpuport.compile_cache(tmp_path) as cache:
        run_program()
        flags = os.environ.get(variable, "")
        monkeypatch.setenv(variable, f"{flags} --xla_cpu_enable_fast_math=true")
        run_program()
        assert [p.hit for p in cache.report.programs if p.name == "program"] == [False, False]
        monkeypatch.setenv(variable, flags)
        run_program()
        assert kinds(cache.report)["program"] is True


def test_another_jaxlib_is_another_program(tmp_path: Path, monkeypatch):
    # The name that jax's key reads: gone from there, the key would no longer tell versions apart.
    from jax._src import cache_key

    with tpuport.compile_cache(tmp_path) as cache:
        run_program()
        monkeypatch.setattr(cache_key, "jaxlib_version_str", "0.0.1")
        run_program()
    assert [p.hit for p in cache.report.programs if p.name == "program"] == [False, False]


@pytest.mark.parametrize("by_jax_alone", [False, True])
def test_a_folder_may_be_copied(tmp_path: Path, monkeypatch, by_jax_alone: bool):
    """Filled where an image is built, say, and read where that runs.

    Goes red when jax leaves the path out: then `compile_cache` need not turn XLA's own cache off.
    """
    if by_jax_alone:
        default = jax.config.jax_persistent_cache_enable_xla_caches
        monkeypatch.setenv("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", default)
    with tpuport.compile_cache(tmp_path / "here"):
        run_program()
    copied = shutil.copytree(tmp_path / "here", tmp_path / "there")
    with tpuport.compile_cache(copied) as cache:
        run_program()
    assert kinds(cache.report)["program"] is not by_jax_alone


# Wrong calls.


def test_wrong_calls_say_what_to_do(tmp_path: Path):
    with pytest.raises(UsageError, match="max_size: expected a number of bytes above 0 or None"):
        tpuport.compile_cache(tmp_path, max_size=0)
    with pytest.raises(UsageError, match="min_compile_seconds: expected 0 or more, got -1"):
        tpuport.compile_cache(tmp_path, min_compile_seconds=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"cannot be made.*name a folder that can be written to"):
        tpuport.compile_cache(tmp_path / "file")


def test_where_programs_are_kept_if_nobody_says(monkeypatch):
    home = Path.home()
    for environment, expected in (
        ({}, home / ".cache/tpuport/compiled"),
        ({"XDG_CACHE_HOME": "/c"}, Path("/c/tpuport/compiled")),
        ({"XDG_CACHE_HOME": "not/absolute"}, home / ".cache/tpuport/compiled"),
        ({"XDG_CACHE_HOME": "/c", "JAX_COMPILATION_CACHE_DIR": "/j"}, Path("/j")),
    ):
        assert cache_folder.default_directory(environment) == expected


def test_the_report_as_text():
    programs = [CacheRecord("Planner_forward", False, 4.25), CacheRecord("add", True, 0.01)]
    report = CacheReport("/cache", programs, 12.0)
    assert str(report) == textwrap.dedent("""\
        compile cache /cache
        1 of 2 programs loaded, 1 compiled, in 4.3 s; at least 12 s saved
          compiled    4.25 s  Planner_forward
          loaded      0.01 s  add""")
    many = CacheReport("/cache", [CacheRecord(f"p{n}", True, n) for n in range(12)])
    assert str(many).endswith("\n  and 2 more")


# Processes.

_MODEL = """
    import json, sys
    import torch, tpuport

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layer = lambda: torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
            self.layers = torch.nn.Sequential(*[layer() for _ in range(2)])
        def forward(self, x, mask):
            y = self.layers(x)
            y[mask] = 0.0
            return y if y.sum() > 0 else -y

    torch.manual_seed(0)
    with tpuport.compile_cache(sys.argv[1]) as cache:
        ported = tpuport.convert(Net().eval(), verify=False)
        x = torch.linspace(-1, 1, 2 * 4 * 32).reshape(2, 4, 32)
        y = ported(x, torch.ones(2, 4, dtype=torch.bool).tril())
    r = cache.report
    out = tpuport.to_torch(y).flatten().tolist()
    main = [p for p in r.programs if p.name == "Net_forward"]
    print(json.dumps({"all": len(r.programs), "hits": r.hits, "out": out,
                      "hit": [p.hit for p in main], "seconds": sum(p.seconds for p in main)}))
"""


def start(code: str, folder: Path, seed: int = 0) -> subprocess.Popen[str]:
    """A process of its own, whose sets and dicts are ordered in their own way."""
    return subprocess.Popen(
        [sys.executable, "-W", "error::UserWarning", "-c", textwrap.dedent(code), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
    )


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What it printed."""
    out, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


def test_a_second_process_loads_every_program(tmp_path: Path):
    first = result_of(start(_MODEL, tmp_path, seed=1))
    assert (first["hits"], first["hit"]) == (0, [False])
    second = result_of(start(_MODEL, tmp_path, seed=2))
    assert (second["hits"], second["hit"]) == (second["all"], [True])
    assert second["all"] == first["all"]
    assert second["out"] == first["out"]
    # About a twelfth on an idle machine; a busy one stretches the shorter of the two most.
    assert second["seconds"] < first["seconds"]


_PLAIN = """
    import json, sys
    import jax, jax.numpy as jnp
    import tpuport

    with tpuport.compile_cache(sys.argv[1]) as cache:
        out = []
        for n in range(1, 13):
            program = jax.jit(lambda x: (jnp.sin(x * n) @ jnp.cos(x).T).sum())
            out.append(float(program(jnp.linspace(0, 1, 64 * 64).reshape(64, 64))))
    print(json.dumps({"out": out, "all": len(cache.report.programs), "hits": cache.report.hits}))
"""


def test_processes_may_fill_one_folder_at_the_same_time(tmp_path: Path):
    first, second = [result_of(p) for p in [start(_PLAIN, tmp_path, seed=n) for n in range(2)]]
    assert first["out"] == second["out"]
    assert len(cache_folder.entries(tmp_path)) >= 12
    assert list(cache_folder.damaged(tmp_path)) == []
    after = result_of(start(_PLAIN, tmp_path))
    assert after["hits"] == after["all"]
    assert after["out"] == first["out"]
