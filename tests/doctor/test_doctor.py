"""What `tpuport doctor` finds on machines of every kind, and on this one."""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tpuport.cli.app import FAILED, app
from tpuport.doctor import machine as machines
from tpuport.doctor.checks import _DEVICES, _TORCHAX, check
from tpuport.doctor.finding import Check, Status
from tpuport.doctor.machine import Answer, Machine, ask, this_machine
from tpuport.doctor.versions import NEEDED, TESTED, check_python, check_versions

ROOT = Path(__file__).parent.parent.parent
CPU = '{"platform": "cpu", "count": 4, "kind": "cpu"}'
GPU = '{"platform": "gpu", "count": 1, "kind": "NVIDIA H100 80GB HBM3"}'
TPU = '{"platform": "tpu", "count": 4, "kind": "TPU v5 lite"}'
WHEELS = "--index-url https://download.pytorch.org/whl/cpu"
HELD = (
    "RuntimeError: Unable to initialize backend 'tpu': ABORTED: The TPU is already in use by"
    " process with pid 176028. Not attempting to load libtpu.so in this process."
)


def machine(tmp_path: Path, **changes: Any) -> Machine:
    """A healthy machine without a TPU, but for some changes.

    `torchax` and `devices` are what the processes that try them answer, `versions` other versions.
    """
    answers = {
        _TORCHAX: changes.pop("torchax", Answer("6.0")),
        _DEVICES: changes.pop("devices", Answer(CPU)),
    }
    healthy = Machine(
        python=(3, 11, 9),
        versions={**TESTED, **changes.pop("versions", {})},
        environment={},
        has_tpu=False,
        has_gpu=False,
        ask=answers.__getitem__,
        timeout=60.0,
        cache=tmp_path / "cache",
        disk=50 * 2**30,
        memory=16 * 2**30,
    )
    return replace(healthy, **changes)


def not_ok(found: list[Check]) -> list[tuple[str, str, str, str | None]]:
    """What is not well, but for the compile cache that does not exist yet."""
    return [
        (one.status.value, one.topic, one.text, one.fix)
        for one in found
        if one.status is not Status.OK and "does not exist yet" not in one.text
    ]


def test_the_tested_versions_are_those_of_the_constraints():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if "==" in line)
    assert {name: pinned[name] for name in TESTED} == TESTED


def test_the_tested_python_is_the_one_that_the_package_asks_for():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">=3.11"' in text
    assert check_python((3, 11, 0)).status is Status.OK


def test_a_healthy_machine_has_no_findings(tmp_path: Path):
    found = check(machine(tmp_path))
    assert not_ok(found) == []
    assert [one.topic for one in found] == [
        *("Python", *TESTED, "torchax runs", "devices", "compile cache", "disk", "memory"),
    ]
    assert next(o for o in found if o.topic == "devices").text == "4 x cpu (cpu)"


# Versions.


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"torch": "2.9.1"},
            ("problem", "torch", "2.9.1 is older than 2.13.0, which tpuport needs",
             "pip install torch==2.13.0"),
        ),
        (
            {"torchax": "0.0.12"},
            ("problem", "torchax",
             f"0.0.12 is older than {TESTED['torchax']}, which tpuport needs",
             f"pip install torchax=={TESTED['torchax']}"),
        ),
        (
            {"transformers": "4.57.0"},
            ("note", "transformers", "4.57.0; tpuport is tested with 5.23.0",
             "pip install transformers==5.23.0"),
        ),
        (
            {"torch": "2.14.0"},
            (
                "problem",
                "torch",
                "2.14.0 is not tested: tpuport is for 2.13 and newer, below 2.14; it is tested with"
                " 2.13.0",
                "pip install torch==2.13.0",
            ),
        ),
        (
            {"torch": "2.13.1"},
            ("note", "torch", "2.13.1; tpuport is tested with 2.13.0", "pip install torch==2.13.0"),
        ),
        (
            {"torch": "2.13.0+cu130"},
            ("note", "torch's build",
             "2.13.0+cu130 brings gigabytes for GPUs that tpuport does not use; the CPU build will"
             " do", f"pip install torch==2.13.0 {WHEELS}"),
        ),
        (
            {"libtpu": None},
            ("note", "libtpu",
             "not installed: jax needs it to use a TPU, and to compile for one without it",
             'pip install "tpuport[tpu]"'),
        ),
        (
            {"diffusers": None},
            ("note", "diffusers", "not installed; some models need it",
             'pip install "tpuport[recipes]"'),
        ),
        (
            {"torch_xla": "2.9.0"},
            ("problem", "torch_xla",
             "2.9.0 takes the TPU for itself, which torchax's jax then cannot have",
             "pip uninstall -y torch_xla"),
        ),
        (
            {"jax-cuda13-plugin": "0.10.2"},
            ("note", "jax-cuda13-plugin",
             "0.10.2 makes jax look for an NVIDIA GPU, which it is not to use here",
             "pip uninstall -y jax-cuda13-plugin"),
        ),
        (
            {"torchvision": "0.25.0"},
            ("problem", "torchvision",
             "0.25.0 is not made for torch 2.13.0: importing fails",
             f"pip install torchvision==0.28.* {WHEELS}"),
        ),
        (
            {"torchvision": "0.28.0+cu130"},
            ("problem", "torchvision",
             "0.28.0+cu130 and torch 2.13.0 are of different builds",
             f"pip install torchvision==0.28.* {WHEELS}"),
        ),
    ],
    ids=lambda p: " ".join(p) if isinstance(p, dict) else "",
)  # fmt: skip
def test_a_version_that_differs(tmp_path: Path, changes, expected):
    assert not_ok(check(machine(tmp_path, versions=changes))) == [expected]


def test_jax_and_jaxlib_have_to_be_equal(tmp_path: Path):
    found = not_ok(check(machine(tmp_path, versions={"jax": "0.11.0"})))
    assert found[1:] == [
        ("problem", "jax and jaxlib", "0.11.0 and 0.10.2 differ", "pip install jaxlib==0.11.0")
    ]


def test_a_torchvision_that_fits_is_well(tmp_path: Path):
    assert not_ok(check(machine(tmp_path, versions={"torchvision": "0.28.1"}))) == []


def test_without_torch_and_jax_it_says_how_to_install_them(tmp_path: Path):
    bare = machine(tmp_path, versions=dict.fromkeys(TESTED))
    found = not_ok(check(replace(bare, ask=lambda code: pytest.fail("nothing to try"))))
    assert [topic for status, topic, *_ in found if status == "problem"] == list(NEEDED)
    assert {fix for status, *_, fix in found if status == "problem"} == {
        'pip install "tpuport[jax]"'
    }


def test_python_itself():
    assert check_python((3, 10, 4)) == Check(
        Status.PROBLEM, "Python", "3.10.4; tpuport needs 3.11 or newer", "python3.11 -m venv .venv"
    )
    assert check_python((3, 13, 1)).text == "3.13.1; tpuport is tested with 3.11"


def test_libtpu_is_a_must_where_there_is_a_tpu():
    (finding,) = (f for f in check_versions({**TESTED, "libtpu": None}, on_tpu=True) if f.fix)
    assert finding.status is Status.PROBLEM


# What has to be tried.


def test_a_torchax_that_does_not_work(tmp_path: Path):
    broken = Answer("", "ImportError: cannot import name 'x' from 'torch'")
    ((status, topic, text, fix),) = not_ok(check(machine(tmp_path, torchax=broken)))
    assert (status, topic) == ("problem", "torchax runs")
    assert text == (
        "it does not work with this torch and jax: ImportError: cannot import name 'x' from 'torch'"
    )
    assert fix == "pip install " + " ".join(f"{name}=={TESTED[name]}" for name in NEEDED)
    ((_, _, text, _),) = not_ok(check(machine(tmp_path, torchax=Answer("7.0"))))
    assert text.endswith(": 7.0")


@pytest.mark.parametrize(
    ("devices", "text", "fix"),
    [
        (
            Answer(timed_out=True),
            "jax did not answer within 60 s: another process may hold the TPU",
            "sudo lsof -w /dev/accel* /dev/vfio/*",
        ),
        (
            Answer("", HELD),
            "the TPU is held by another process, 176028",
            "ps -fp 176028",
        ),
        (
            Answer("", "RuntimeError: Unable to initialize backend 'cuda': no such backend"),
            "jax was told to use cuda and cannot: no such backend",
            "unset JAX_PLATFORMS",
        ),
        (
            Answer("", "AssertionError"),
            "jax was told by JAX_PLATFORMS to use a platform of which no package is installed",
            "unset JAX_PLATFORMS",
        ),
        (
            Answer("", "Segmentation fault"),
            "Segmentation fault",
            "JAX_PLATFORMS=cpu tpuport doctor",
        ),
    ],
    ids=["hangs", "held", "cuda", "no plugin", "crash"],
)
def test_devices_that_jax_cannot_have(tmp_path: Path, devices: Answer, text: str, fix: str):
    assert not_ok(check(machine(tmp_path, devices=devices))) == [("problem", "devices", text, fix)]


def test_a_tpu_that_jax_does_not_use(tmp_path: Path):
    found = not_ok(check(machine(tmp_path, has_tpu=True)))
    text = "4 x cpu (cpu), and this machine has a TPU that jax does not use"
    assert found == [("problem", "devices", text, 'pip install "tpuport[tpu]"')]
    chosen = {"JAX_PLATFORMS": "cpu"}
    found = not_ok(check(machine(tmp_path, has_tpu=True, environment=chosen)))
    assert found[0] == ("problem", "devices", text, "unset JAX_PLATFORMS")
    assert not_ok(check(machine(tmp_path, has_tpu=True, devices=Answer(TPU)))) == []


CUDA = {"jax-cuda13-plugin": "0.10.2"}


def test_a_gpu_that_jax_uses_is_well(tmp_path: Path):
    of_cuda = {"torch": "2.13.0+cu130", "torchvision": "0.28.0+cu130"}
    one = machine(tmp_path, has_gpu=True, versions={**CUDA, **of_cuda}, devices=Answer(GPU))
    assert not_ok(check(one)) == []
    # A TPU of the same machine comes first.
    both = replace(one, has_tpu=True, ask=machine(tmp_path, devices=Answer(TPU)).ask)
    fixes = [fix for *_, fix in not_ok(check(both))]
    assert "pip uninstall -y jax-cuda13-plugin" in fixes
    assert f"pip install torch==2.13.0 {WHEELS}" in fixes


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 'pip install "tpuport[gpu]"'),
        ({"versions": CUDA}, "nvidia-smi"),
        ({"versions": CUDA, "environment": {"JAX_PLATFORMS": "cpu"}}, "unset JAX_PLATFORMS"),
    ],
    ids=["no plugin", "no driver", "told so"],
)
def test_a_gpu_that_jax_does_not_use(tmp_path: Path, changes: dict[str, Any], expected: str):
    found = not_ok(check(machine(tmp_path, has_gpu=True, **changes)))
    text = "4 x cpu (cpu), and this machine has a GPU that jax does not use"
    assert found[0] == ("note", "devices", text, expected)
    assert not any("uninstall" in (fix or "") for *_, fix in found)


def test_plugins_that_do_not_fit(tmp_path: Path):
    two = {"jax-cuda12-plugin": "0.10.2", "jax-cuda13-plugin": "0.9.0"}
    found = check(machine(tmp_path, has_gpu=True, versions=two, devices=Answer(GPU)))
    assert not_ok(found) == [
        (
            *("problem", "jax-cuda12-plugin"),
            "0.10.2 is beside jax-cuda13-plugin: jax takes one of them only",
            "pip uninstall -y jax-cuda12-plugin",
        ),
        (
            *("problem", "jax-cuda13-plugin"),
            "0.9.0 and jaxlib 0.10.2 differ, so jax may leave the GPU alone",
            "pip install jax-cuda13-plugin==0.10.2",
        ),
    ]


def test_a_torchvision_of_a_gpu_has_torchs_build(tmp_path: Path):
    versions = {**CUDA, "torch": "2.13.0+cu130", "torchvision": "0.28.0+cpu"}
    one = machine(tmp_path, has_gpu=True, versions=versions, devices=Answer(GPU))
    ((*_, fix),) = not_ok(check(one))
    assert fix == f"pip install torchvision==0.28.* {WHEELS.replace('cpu', 'cu130')}"


def test_device_files(tmp_path: Path):
    assert not machines._has_any(machines._GPU_FILES, tmp_path)
    (tmp_path / "nvidiactl").touch()  # the driver without a GPU
    assert not machines._has_any(machines._GPU_FILES, tmp_path)
    (tmp_path / "nvidia0").touch()
    assert machines._has_any(machines._GPU_FILES, tmp_path)
    assert not machines._has_any(machines._TPU_FILES, tmp_path)


def test_a_torchax_that_hangs(tmp_path: Path):
    ((status, _, text, fix),) = not_ok(check(machine(tmp_path, torchax=Answer(timed_out=True))))
    assert (status, fix) == ("problem", "tpuport doctor --timeout 300")
    assert "more than 60 s" in text


# Environment and room.


def test_variables_worth_knowing(tmp_path: Path):
    environment = {
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_JIT": "1",
        "JAX_ENABLE_X64": "0",
        "LIBTPU_INIT_ARGS": "--xla_tpu_a=1",
        "XLA_FLAGS": "--xla_dump_to=/tmp/x",
    }
    assert not_ok(check(machine(tmp_path, environment=environment))) == [
        ("note", "JAX_PLATFORMS", "cpu: jax uses nothing else", None),
        (
            *("note", "JAX_DISABLE_JIT", "1: nothing is compiled, so everything is slow"),
            "unset JAX_DISABLE_JIT",
        ),
        (
            *("note", "LIBTPU_INIT_ARGS"),
            "--xla_tpu_a=1: options of the TPU's compiler; part of the compile cache's key",
            None,
        ),
        (
            *("note", "XLA_FLAGS"),
            "--xla_dump_to=/tmp/x: options of the compiler; part of the compile cache's key",
            None,
        ),
        (
            *("note", "XLA_FLAGS"),
            "--xla_dump_to writes files for each program that is compiled",
            None,
        ),
    ]


def test_little_room(tmp_path: Path):
    small = machine(tmp_path, disk=2**30, memory=2**30)
    assert [found[1:3] for found in not_ok(check(small))] == [
        ("disk", "1.0 GiB free for the compile cache, which is little"),
        ("memory", "1.0 GiB free, which is little"),
    ]
    assert "memory" not in {one.topic for one in check(replace(small, memory=None))}


# The compile cache.


def make_cache(folder: Path) -> Path:
    """A compile cache with a whole entry that was used again, and one that was not."""
    import zlib

    folder.mkdir(mode=0o700)
    for name, later in (("jit_a-00", 5), ("jit_b-11", 0)):
        path = folder / f"{name}-cache"
        path.write_bytes(zlib.compress(b"program" * 1000))
        used = path.stat().st_mtime_ns + later * 10**9
        (folder / f"{name}-atime").write_bytes(used.to_bytes(8, "little"))
    return folder


def test_a_compile_cache_that_is_well(tmp_path: Path):
    folder = make_cache(tmp_path / "cache")
    found = check(machine(tmp_path))
    assert not_ok(found) == []
    text = next(one.text for one in found if one.topic == "compile cache")
    assert text == (
        f"{folder}: 2 programs, 0.0 MiB; 1 of them were loaded again since they were kept"
    )


def test_a_compile_cache_with_problems(tmp_path: Path):
    folder = make_cache(tmp_path / "cache")
    folder.chmod(0o777)
    broken = folder / "jit_b-11-cache"
    broken.write_bytes(broken.read_bytes()[:20])
    assert not_ok(check(machine(tmp_path))) == [
        (
            *("problem", "compile cache"),
            f"others can write to {folder}, and the programs in it are trusted",
            f"chmod go-w {folder}",
        ),
        (
            *("problem", "compile cache"),
            "1 damaged entry is compiled anew in every process",
            f"rm {broken}",
        ),
    ]


def test_a_compile_cache_that_cannot_be_written_to(tmp_path: Path, monkeypatch):
    folder = make_cache(tmp_path / "cache")
    # The tests may run as root, who can write everywhere.
    monkeypatch.setattr("tpuport.aot.cache.cache_folder.is_writable", lambda directory: False)
    assert not_ok(check(machine(tmp_path))) == [
        (
            *("problem", "compile cache", f"{folder} cannot be written to"),
            f"sudo chown -R $USER {folder}",
        )
    ]


# For real.


def test_a_process_that_fails_hangs_or_dies():
    assert ask("print(1); print('last')", 60) == Answer("last")
    assert ask("raise RuntimeError('why')", 60) == Answer("", "RuntimeError: why")
    assert ask("import time; time.sleep(60)", 0.5) == Answer(timed_out=True)
    assert ask("import os; os._exit(3)", 60) == Answer("", "it ended with status 3")


def test_this_machine(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none" / "yet"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    this = this_machine(200.0)
    assert this.python == sys.version_info[:3]
    assert this.cache == tmp_path / "none/yet/tpuport/compiled"
    assert this.disk > 0
    result = CliRunner().invoke(app, ["doctor", "--timeout", "200"])
    lines = result.stdout.splitlines()
    assert result.exit_code == 0, result.stdout
    assert re.search(
        r"^ok       torchax runs +imported, and two tensors added$", result.stdout, re.M
    )
    assert re.search(r"^ok       devices +8 x cpu \(cpu\)$", result.stdout, re.M)
    assert re.fullmatch(r"0 problems, \d+ notes?", lines[-1])


def test_json_and_the_exit_code(monkeypatch, tmp_path: Path):
    sick = machine(tmp_path, versions={"torch_xla": "2.9.0"})
    monkeypatch.setattr(machines, "this_machine", lambda timeout: sick)
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == FAILED
    found = json.loads(result.stdout)["findings"]
    assert {"status": "problem", "fix": "pip uninstall -y torch_xla"}.items() <= next(
        one for one in found if one["topic"] == "torch_xla"
    ).items()
    text = CliRunner().invoke(app, ["doctor"]).stdout
    assert "\nproblem  torch_xla      2.9.0 takes the TPU" in text
    assert f"\n{'':24}pip uninstall -y torch_xla\n" in text
    assert text.endswith("\n1 problem, 1 note\n")
