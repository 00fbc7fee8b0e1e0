"""The checks, in the order of the output."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from shlex import quote

from tpuport.aot.cache import cache_folder
from tpuport.diagnosis.causes._cause import Raised
from tpuport.diagnosis.causes.tpu_unavailable import TpuUnavailable
from tpuport.doctor.finding import Check, note, ok, problem
from tpuport.doctor.machine import Answer, Machine
from tpuport.doctor.versions import GPU_PLUGINS, NEEDED, TESTED, check_python, check_versions

_GIB = 2**30
_LITTLE_DISK = 5 * _GIB
_LITTLE_MEMORY = 4 * _GIB

_TORCHAX = """
import torch, torchax, jax.numpy as jnp
with torchax.default_env():
    x = torchax.interop.torch_view(jnp.ones(3))
    print(float((x + x).sum().jax()))
"""
_DEVICES = """
import json, jax
kinds = [d.device_kind for d in jax.devices()]
print(json.dumps({"platform": jax.default_backend(), "count": len(kinds), "kind": kinds[0]}))
"""
# Environment variables that change what runs: the values that matter (all if empty), their effect.
_VARIABLES = {
    "JAX_DISABLE_JIT": (("1", "true", "True"), "nothing is compiled, so everything is slow"),
    "JAX_ENABLE_X64": (("1", "true", "True"), "64-bit types stay, which a TPU emulates slowly"),
    "JAX_ENABLE_COMPILATION_CACHE": (("0", "false", "False"), "the compile cache is off"),
    "JAX_DEBUG_NANS": (("1", "true", "True"), "each result is checked for NaN, which waits for it"),
    "JAX_CHECK_TRACER_LEAKS": (("1", "true", "True"), "tracing is much slower"),
    "LIBTPU_INIT_ARGS": ((), "options of the TPU's compiler; part of the compile cache's key"),
    "XLA_FLAGS": ((), "options of the compiler; part of the compile cache's key"),
    "TPU_VISIBLE_CHIPS": ((), "jax sees these chips only"),
}


def check(machine: Machine) -> list[Check]:
    """Run all checks on a machine, and return the findings, including those without a problem."""
    installed = all(machine.versions.get(name) for name in NEEDED)
    with ThreadPoolExecutor(2) as pool:
        # In parallel: each takes seconds, or the full timeout if another process holds the TPU.
        torchax = pool.submit(machine.ask, _TORCHAX) if installed else None
        devices = pool.submit(machine.ask, _DEVICES) if machine.versions.get("jax") else None
        found = [check_python(machine.python)]
        found += check_versions(machine.versions, on_tpu=machine.has_tpu, on_gpu=machine.has_gpu)
        found += [] if torchax is None else [_torchax(torchax.result(), machine)]
        found += [] if devices is None else [_devices(devices.result(), machine)]
    return [*found, *_environment(machine), *_cache(machine), *_room(machine)]


def _torchax(answer: Answer, machine: Machine) -> Check:
    topic = "torchax runs"
    if answer.timed_out:
        text = f"importing it and adding two tensors took more than {machine.timeout:.0f} s"
        return problem(topic, text, "tpuport doctor --timeout 300")
    if answer.error or answer.output != "6.0":
        text = f"it does not work with this torch and jax: {answer.error or answer.output}"
        pinned = " ".join(f"{name}=={TESTED[name]}" for name in NEEDED)
        return problem(topic, text, f"pip install {pinned}")
    return ok(topic, "imported, and two tensors added")


def _devices(answer: Answer, machine: Machine) -> Check:
    topic = "devices"
    if answer.timed_out:
        return problem(
            topic,
            f"jax did not answer within {machine.timeout:.0f} s: another process may hold the TPU",
            "sudo lsof -w /dev/accel* /dev/vfio/*",
        )
    if answer.error:
        return problem(topic, *explain_refusal(answer.error))
    seen = json.loads(answer.output)
    text = f"{seen['count']} x {seen['kind']} ({seen['platform']})"
    if machine.has_tpu and seen["platform"] != "tpu":
        chosen = machine.environment.get("JAX_PLATFORMS")
        fix = "unset JAX_PLATFORMS" if chosen else 'pip install "tpuport[tpu]"'
        return problem(topic, f"{text}, and this machine has a TPU that jax does not use", fix)
    if machine.has_gpu and not machine.has_tpu and seen["platform"] == "cpu":
        text += ", and this machine has a GPU that jax does not use"
        return note(topic, text, _gpu_fix(machine))
    return ok(topic, text)


def _gpu_fix(machine: Machine) -> str:
    """Return the command for a GPU that jax does not use."""
    if machine.environment.get("JAX_PLATFORMS"):
        return "unset JAX_PLATFORMS"
    # With the plugin it is the driver: too old for it, or not running.
    has_plugin = any(machine.versions.get(name) for name in GPU_PLUGINS)
    return "nvidia-smi" if has_plugin else 'pip install "tpuport[gpu]"'


def explain_refusal(error: str) -> tuple[str, str]:
    """Return why jax cannot have its devices, and the command to run.

    Args:
        error: The last line of the traceback.
    """
    kind, _, message = error.partition(": ")
    if error.rstrip(": ") == "AssertionError":
        # jax asserts that one of the platforms of JAX_PLATFORMS started.
        return (
            "jax was told by JAX_PLATFORMS to use a platform of which no package is installed",
            "unset JAX_PLATFORMS",
        )
    said = TpuUnavailable().explain(Raised((f"builtins.{kind}",), message))
    if said is None:
        return error, "JAX_PLATFORMS=cpu tpuport doctor"
    return said.problem, said.remedies[0].rpartition(": ")[2]


def _environment(machine: Machine) -> Iterator[Check]:
    chosen = machine.environment.get("JAX_PLATFORMS")
    if chosen:
        yield note("JAX_PLATFORMS", f"{chosen}: jax uses nothing else")
    for name, (values, text) in _VARIABLES.items():
        value = machine.environment.get(name, "")
        if value and (not values or value in values):
            yield note(name, f"{value}: {text}", None if not values else f"unset {name}")
    if "--xla_dump_to" in machine.environment.get("XLA_FLAGS", ""):
        yield note("XLA_FLAGS", "--xla_dump_to writes files for each program that is compiled")


def _cache(machine: Machine) -> Iterator[Check]:
    topic, folder = "compile cache", machine.cache
    if not folder.is_dir():
        yield note(topic, f"{folder} does not exist yet: tpuport.compile_cache() makes it")
        return
    kept = cache_folder.entries(folder)
    size = sum(entry.size for entry in kept) / 2**20
    used = sum(map(cache_folder.was_used, kept))
    yield ok(
        topic,
        f"{folder}: {len(kept)} programs, {size:.1f} MiB; {used} of them were loaded again since"
        " they were kept",
    )
    yield from _cache_problems(folder)


def _cache_problems(folder: Path) -> Iterator[Check]:
    topic, name = "compile cache", quote(str(folder))
    if not cache_folder.is_writable(folder):
        yield problem(topic, f"{folder} cannot be written to", f"sudo chown -R $USER {name}")
    if cache_folder.open_to_others(folder):
        text = f"others can write to {folder}, and the programs in it are trusted"
        yield problem(topic, text, f"chmod go-w {name}")
    broken = list(cache_folder.damaged(folder))
    if broken:
        count = f"{len(broken)} damaged {'entry is' if len(broken) == 1 else 'entries are'}"
        files = " ".join(quote(str(path)) for path in broken)
        yield problem(topic, f"{count} compiled anew in every process", f"rm {files}")


def _room(machine: Machine) -> Iterator[Check]:
    disk = f"{machine.disk / _GIB:.1f} GiB free for the compile cache"
    little = machine.disk < _LITTLE_DISK
    yield note("disk", f"{disk}, which is little") if little else ok("disk", disk)
    if machine.memory is not None:
        memory = f"{machine.memory / _GIB:.1f} GiB free"
        little = machine.memory < _LITTLE_MEMORY
        yield note("memory", f"{memory}, which is little") if little else ok("memory", memory)
