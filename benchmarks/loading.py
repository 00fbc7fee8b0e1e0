"""`python -m benchmarks.loading`: host memory and time that loading a checkpoint takes.

Writes docs/loading.md. Each way to load runs in its own process, round by round in turn, with the
file in the page cache. Memory is the highest resident set (`VmHWM`: anonymous, shared and mapped
file pages alike) above what the process had before it loaded.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import machine

PAGE = Path(__file__).parent.parent / "docs" / "loading.md"
OURS = "tpuport.load_checkpoint"
MAPPED = "safetensors.torch.load_file, values read"


@dataclass(frozen=True)
class Load:
    """One load.

    Attributes:
        seconds: Seconds until every array was loaded.
        cpu: CPU seconds of this process meanwhile, system calls included.
        memory: Peak memory above that before loading, as a multiple of the file.
    """

    seconds: float
    cpu: float
    memory: float


def write_files(folder: Path, megabytes: int) -> dict[str, Path]:
    """Write a safetensors and a torch file of equal float32 tensors: half small, half of 32 MB."""
    import torch
    from safetensors.torch import save_file

    large = max(1, megabytes // 64)
    tensors = {f"large.{i}": torch.randn(8 << 20) for i in range(large)}
    tensors |= {f"small.{i}": torch.randn(1 << 18) for i in range(megabytes - 32 * large)}
    paths = {"safetensors": folder / "weights.safetensors", "torch": folder / "weights.pt"}
    save_file(tensors, paths["safetensors"])
    torch.save(tensors, paths["torch"])
    for path in paths.values():
        with path.open("rb") as file:
            os.fsync(file.fileno())  # so that no load competes with the disk
    return paths


def _ours(path: Path, **options: Any) -> object:
    import tpuport

    return tpuport.load_checkpoint(path, **options)


def _mapped(path: Path) -> object:
    from safetensors.torch import load_file

    # load_file only maps the file. The sum reads the values into memory.
    tensors = load_file(path)
    return tensors, [tensor.sum() for tensor in tensors.values()]


def _to_jax(tensors: Iterable[tuple[str, Any]]) -> object:
    import jax.numpy as jnp

    return {name: jnp.array(tensor.numpy(), copy=True) for name, tensor in tensors}


def _library(path: Path) -> object:
    from safetensors.torch import load_file

    return _to_jax(load_file(path).items())


def _torch(path: Path) -> object:
    import torch

    return _to_jax(torch.load(path, weights_only=True).items())


# The kind of file, and the function that loads it.
CONTESTANTS: dict[str, tuple[str, Callable[[Path], object]]] = {
    OURS: ("safetensors", _ours),
    f"{OURS}, dtype='bfloat16'": ("safetensors", lambda path: _ours(path, dtype="bfloat16")),
    MAPPED: ("safetensors", _mapped),
    "safetensors.torch.load_file, then jax arrays": ("safetensors", _library),
    f"{OURS} of a .pt file": ("torch", _ours),
    "torch.load, then jax arrays": ("torch", _torch),
}


def load_here(name: str, path: Path) -> Load:
    """Load once in this process, which must not have loaded anything before."""
    import jax
    import numpy as np

    # Imported first, since importing is no part of loading.
    importlib.import_module("safetensors.torch")
    importlib.import_module("tpuport.weights")

    jax.device_put(np.ones(3)).block_until_ready()
    before = _resident("VmRSS")
    start, computed = time.perf_counter(), time.process_time()
    held = CONTESTANTS[name][1](path)
    jax.block_until_ready(held)
    seconds, cpu = time.perf_counter() - start, time.process_time() - computed
    return Load(seconds, cpu, (_resident("VmHWM") - before) / path.stat().st_size)


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    msg = f"/proc/self/status has no {key}: this benchmark needs Linux"
    raise RuntimeError(msg)


def load_apart(name: str, path: Path) -> Load:
    """Load once in a fresh process."""
    command = [sys.executable, "-m", "benchmarks.loading", "--one", name, "--file", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Load(**json.loads(done.stdout.splitlines()[-1]))


def measure(paths: dict[str, Path], names: Iterable[str], rounds: int) -> dict[str, list[Load]]:
    """Measure each contestant's loads, round by round."""
    found: dict[str, list[Load]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, loads in found.items():
            loads.append(load_apart(name, paths[CONTESTANTS[name][0]]))
            print(f"{name}: {loads[-1]}", flush=True)
    return found


def page(results: dict[str, list[Load]], megabytes: int) -> str:
    """Return the page of docs/ that shows the results."""
    about = machine.describe()
    rounds = len(next(iter(results.values())))
    lines = [
        "# What loading a checkpoint takes",
        "",
        "Written by `python -m benchmarks.loading`; do not edit.",
        "",
        f"A file of {megabytes} MiB of float32 tensors, half of them of 32 MiB and half of 1 MiB"
        f" each, in the page cache;\n{about['system']}, {about['processor']},"
        f" {about['cores']} core(s); medians of {rounds} rounds, each load in a fresh process.\n"
        "Memory is the highest resident set above that before loading (mapped file pages count),\n"
        "as a multiple of the file.",
        "",
        f"| | peak memory | seconds | CPU seconds | CPU time of `{OURS}` relative to it |",
        "| --- | --- | --- | --- | --- |",
    ]
    ours = [load.cpu for load in results[OURS]]
    for name, loads in results.items():
        ratio = statistics.median(a / b.cpu for a, b in zip(ours, loads, strict=True))
        memory = max(load.memory for load in loads)
        seconds = statistics.median(load.seconds for load in loads)
        cpu = statistics.median(load.cpu for load in loads)
        lines.append(f"| {name} | {memory:.2f}x | {seconds:.2f} | {cpu:.2f} | {ratio:.2f}x |")
    return "\n".join([*lines, ""])


def main() -> None:
    """Measure every way to load, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loading", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=2048, help="size of the file")
    parser.add_argument("--rounds", type=int, default=5, help="loads of each contestant")
    parser.add_argument("--out", type=Path, default=PAGE, help="the page to write")
    parser.add_argument("--one", choices=CONTESTANTS, help="load once in this process")
    parser.add_argument("--file", type=Path, help="the file that --one loads")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(load_here(options.one, options.file))))
        sys.stdout.flush()
        os._exit(0)  # freeing gigabytes page by page is no part of loading
    with tempfile.TemporaryDirectory() as folder:
        paths = write_files(Path(folder), options.megabytes)
        results = measure(paths, CONTESTANTS, options.rounds)
    options.out.write_text(page(results, options.megabytes), encoding="utf-8")
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
