"""libtpu is left alone where it could find no TPU."""

import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import jax
import pytest

from tpuport.foundation.interop import platforms


@pytest.fixture
def machine(monkeypatch):
    """Returns what jax is told on a machine with libtpu and what a test adds."""
    monkeypatch.setattr(
        platforms.importlib.util, "find_spec", lambda name: name == "libtpu" or None
    )
    monkeypatch.setattr(platforms.importlib.metadata, "entry_points", lambda group: ())
    monkeypatch.setattr(platforms.glob, "glob", lambda pattern: [])
    for name in ("TPU_WORKER_HOSTNAMES", "JAX_FORCE_TPU_INIT"):
        monkeypatch.delenv(name, raising=False)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", None)

    def told():
        platforms.leave_out_libtpu()
        return jax.config.jax_platforms

    yield told
    jax.config.update("jax_platforms", before)


def test_without_any_chip_there_is_the_cpu_only(machine):
    assert machine() == "cpu"


def test_without_libtpu_jax_decides(machine, monkeypatch):
    monkeypatch.setattr(platforms.importlib.util, "find_spec", lambda name: None)
    assert machine() is None


@pytest.mark.parametrize("chip", ["/dev/accel[0-9]*", "/dev/vfio/[0-9]*", "pci"])
def test_where_there_may_be_a_tpu_jax_decides(machine, monkeypatch, tmp_path, chip: str):
    (tmp_path / "vendor").write_text("0x1ae0\n")
    found = {"/sys/bus/pci/devices/*/vendor" if chip == "pci" else chip: [tmp_path / "vendor"]}
    monkeypatch.setattr(platforms.glob, "glob", lambda pattern: found.get(pattern, []))
    assert machine() is None


@pytest.mark.parametrize("name", ["TPU_WORKER_HOSTNAMES", "JAX_FORCE_TPU_INIT"])
def test_where_the_environment_speaks_of_tpus_jax_decides(machine, monkeypatch, name: str):
    monkeypatch.setenv(name, "host")
    assert machine() is None


def test_with_a_plugin_for_other_hardware_jax_decides(machine, monkeypatch):
    plugin = EntryPoint("rocm", "a.b", "jax_plugins")
    monkeypatch.setattr(platforms.importlib.metadata, "entry_points", lambda group: (plugin,))
    assert machine() is None


def test_what_was_chosen_stays(machine):
    jax.config.update("jax_platforms", "tpu,cpu")
    assert machine() == "tpu,cpu"


@pytest.mark.skipif(platforms._may_be_there(), reason="this machine may have a TPU")
def test_a_run_on_the_cpu_prints_nothing_of_libtpu():
    code = "import torch, tpuport\ntpuport.convert(torch.nn.Linear(2, 2))(torch.ones(1, 2))"
    environment = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
