"""`python -m benchmarks.quantized_policy`: a call of a small π0 with DuQuant against the fork's.

The openpi fork of DuQuant (JingxuanZhang77/openpi_duquant) rounds by fake quantization, in eager
PyTorch or under torch.compile. Its untouched layers are put into the policy of `recipes/openpi`;
TPUPORT_OPENPI_DUQUANT names its checkout. Here are the first calls and later ones of these and of
`tpuport.quantize`, and products of int8 against those of floats.
"""

import argparse
import copy
import importlib
import os
import re
import statistics
import sys
import tempfile
import time
import types
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

import tpuport
from benchmarks import machine
from benchmarks.contestants import check_compiler
from benchmarks.timing import Series, interleaved, ratio
from recipes.openpi.config import CAMERAS, Config, Transformer, Vision
from recipes.openpi.gemma import Keys
from recipes.openpi.model import Batch, Pi0, Prefix
from recipes.openpi.quantize import quantize_policy
from recipes.openpi.weights import random_weights
from tpuport.quantization import QuantizationScheme
from tpuport.quantization.product import lower_scaled_product, pack

FORK = "TPUPORT_OPENPI_DUQUANT"
SMALL = Config(
    action_dim=32, action_horizon=16, vocab_size=512,
    language=Transformer(256, 2, 1024, heads=4, head_dim=64),
    expert=Transformer(128, 2, 512, heads=4, head_dim=64),
    vision=Vision(128, 2, 512, heads=4, image_size=56),
)  # fmt: skip
# The fork's own: scales of inputs by channel, outputs rotated, too. Products are then of floats.
AS_FORK = QuantizationScheme(
    4, 8, method="duquant", activations="channel", estimator="percentile", clip="mse",
    rotate_outputs=True,
)  # fmt: skip
SCHEMES: dict[str, QuantizationScheme | str] = {
    "tpuport, the fork's scheme": AS_FORK,
    "tpuport, duquant-w4a8": "duquant-w4a8",
    "tpuport, w8a8": "w8a8",
}
# The layers that `recipes/openpi` quantizes: those of both transformers.
QUANTIZED = re.compile(r"(language_model|gemma_expert)\..*layers\.\d+\..*_proj$")
EAGER, COMPILED, FLOAT = "the fork, eager", "the fork, torch.compile", "tpuport, float"
Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Way:
    """One way to call the policy.

    Attributes:
        call: Returns a chunk of actions.
        prepared: Seconds of packing, or of calibration and freezing.
        first: Seconds of the first three calls.
    """

    call: Call
    prepared: float
    first: tuple[float, ...]


def fork_layers(checkout: Path) -> Any:
    """Return the fork's module of layers, without the rest of its package."""
    package = types.ModuleType("duquant_of_fork")
    package.__path__ = [str(checkout / "src/openpi/models_pytorch")]
    sys.modules[package.__name__] = package
    return importlib.import_module("duquant_of_fork.duquant_layers")


def with_fork(policy: Pi0, names: list[str], layers: Any, folder: str) -> Pi0:
    """Return a copy of a policy with the fork's layers in place of linear ones."""
    made = copy.deepcopy(policy)
    config = layers.DuQuantConfig(pack_dir=folder)
    for name in names:
        parent, _, leaf = name.rpartition(".")
        layer = layers.DuQuantLinear(made.get_submodule(name), name, config)
        setattr(made.get_submodule(parent), leaf, layer)
    return made


def observation(config: Config, seed: int) -> tuple[Batch, torch.Tensor]:
    """Return a batch of one random observation, and noise."""
    g = torch.Generator().manual_seed(seed)
    side, tokens = config.vision.image_size, config.max_token_len
    shape = (1, len(CAMERAS), side, side, 3)
    batch = {
        "images": torch.randint(0, 256, shape, generator=g, dtype=torch.uint8),
        "image_masks": torch.ones(1, len(CAMERAS), dtype=torch.bool),
        "tokens": torch.randint(0, config.vocab_size, (1, tokens), generator=g, dtype=torch.int32),
        "token_mask": torch.arange(tokens)[None] < tokens - 8,
        "state": torch.randn(1, config.action_dim, generator=g),
    }
    return batch, torch.randn(1, config.action_horizon, config.action_dim, generator=g)


def timed(make: Callable[[], Call]) -> Way:
    """Make a way, and call it three times."""
    began = time.perf_counter()
    call = make()
    prepared, first = time.perf_counter() - began, []
    for _ in range(3):
        began = time.perf_counter()
        call()
        first.append(time.perf_counter() - began)
    return Way(call, prepared, tuple(first))


def ways(
    config: Config, steps: int, checkout: Path | None, *, compiler: bool = True
) -> dict[str, Way]:
    """Return each way to call the policy, after its first calls."""
    policy = random_weights(config)
    batch, noise = observation(config, 0)
    calibration = [observation(config, seed) for seed in range(1, 5)]

    def ours(given: Any) -> Call:
        ported: Any = tpuport.convert(given, methods=("sample_actions",), verify=False)
        count = torch.tensor(steps, dtype=torch.int32)
        return lambda: tpuport.to_torch(ported.sample_actions(batch, noise, count))

    def quantized(scheme: QuantizationScheme | str) -> Callable[[], Call]:
        return lambda: ours(quantize_policy(policy, scheme, calibration, num_steps=steps).policy)

    found = (
        {}
        if checkout is None
        else _of_fork(policy, (batch, noise, steps), checkout, compiler=compiler)
    )
    found |= {name: timed(quantized(scheme)) for name, scheme in SCHEMES.items()}
    found[FLOAT] = timed(lambda: ours(policy))
    return found


def _of_fork(
    policy: Pi0, given: tuple[Batch, torch.Tensor, int], checkout: Path, *, compiler: bool
) -> dict[str, Way]:
    """Return the fork's ways. Dynamo has to compile before torchax is imported."""
    layers = fork_layers(checkout)
    names = [name for name in dict(policy.named_modules()) if QUANTIZED.search(name)]

    def fork(*, compiled: bool) -> Call:
        with tempfile.TemporaryDirectory() as folder:
            made = with_fork(policy, names, layers, folder)
        if compiled:
            return compiled_call(made, *given)
        return torch.no_grad()(lambda: made.sample_actions(*given))

    found = {}
    if compiler:
        check_compiler()
        found[COMPILED] = timed(lambda: fork(compiled=True))
    found[EAGER] = timed(lambda: fork(compiled=False))
    return found


def compiled_call(policy: Pi0, batch: Batch, noise: torch.Tensor, steps: int) -> Call:
    """Return a call under torch.compile, as kind to it as can be.

    The fork compiles its first call, with all steps unrolled, and its layers turn their weights in
    it block by block. Here they have done so in eager PyTorch, and a step is compiled once.
    """

    def read(batch: Batch) -> tuple[list[Keys], torch.Tensor]:
        prefix = policy.read_prefix(batch, policy.encode_images(batch["images"]))
        return prefix.keys, prefix.valid

    def step(keys: list[Keys], valid: torch.Tensor, *moving: torch.Tensor) -> torch.Tensor:
        return policy.velocity(Prefix(keys, valid), batch["state"], *moving)

    prefix_of = torch.compile(read, fullgraph=True, dynamic=False)
    velocity = torch.compile(step, fullgraph=True, dynamic=False)

    @torch.no_grad()
    def call() -> torch.Tensor:
        prefix, x = prefix_of(batch), noise
        for index in range(steps):
            time = torch.full((len(x),), 1 - index / steps)
            x = x - velocity(*prefix, x, time) / steps
        return x

    with torch.no_grad():
        policy.sample_actions(batch, noise, steps)
    return call


def policy_lines(found: dict[str, Way], rounds: int, seconds: float) -> list[str]:
    """Return a table of what each way takes, and how its actions differ from float's."""
    times = interleaved(
        {name: way.call for name, way in found.items()}, rounds=rounds, seconds=seconds
    )
    wanted = found[FLOAT].call()
    lines = [
        "| way | preparation | calls 1, 2, 3 | later, wall | CPU | of tpuport's w8a8 | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, way in found.items():
        first = ", ".join(f"{one:.2f}" for one in way.first)
        wall, cpu = (statistics.median(one) for one in (times[name].wall, times[name].cpu))
        against = ratio(times[name].cpu, times["tpuport, w8a8"].cpu).median
        error = float((way.call() - wanted).norm() / wanted.norm())
        cells = (
            f"{way.prepared:.1f} s", f"{first} s", f"{wall * 1000:.0f} ms", f"{cpu * 1000:.0f} ms",
            f"{against:.2f}", f"{error:.3f}",
        )  # fmt: skip
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def product_lines(rounds: int, seconds: float) -> list[str]:
    """Return a table of products of rows with a weight, of the time of those of float32."""
    lines = ["| rows x in x out | bfloat16 | int8 | codes of 4 bits |", "|---|---|---|---|"]
    rng = np.random.default_rng(0)
    for rows, size, out in ((1, 1024, 1024), (16, 1024, 1024), (256, 1024, 1024)):
        x = rng.standard_normal((rows, size), np.float32)
        weight = rng.standard_normal((out, size), np.float32)
        low = rng.integers(-8, 8, (1, out, size)).astype(np.int8)
        codes, scale = (
            rng.integers(-128, 128, (rows, size)).astype(np.int8),
            np.ones((1, out), np.float32),
        )

        def product(a: jax.Array, b: jax.Array) -> jax.Array:
            return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())))

        def scaled(bits: int) -> Any:
            return jax.jit(lambda a, b, c: lower_scaled_product(a, b, c, bits))

        half = jax.numpy.bfloat16
        four = pack(torch.from_numpy(low), 4).numpy()
        calls = {
            "float32": (jax.jit(product), x, weight),
            "bfloat16": (jax.jit(product), x.astype(half), weight.astype(half)),
            "int8": (scaled(8), codes, low, scale),
            "int4": (scaled(4), codes, four, scale),
        }  # fmt: skip
        placed = {name: (one[0], *map(jax.device_put, one[1:])) for name, one in calls.items()}
        times = interleaved(
            {name: _blocking(*one) for name, one in placed.items()}, rounds=rounds, seconds=seconds
        )
        lines.append(f"| {rows} x {size} x {out} | {_of_float(times)} |")
    return lines


def _blocking(function: Any, *given: Any) -> Callable[[], Any]:
    return lambda: function(*given).block_until_ready()


def _of_float(times: dict[str, Series]) -> str:
    names = ("bfloat16", "int8", "int4")
    return " | ".join(f"{ratio(times[n].cpu, times['float32'].cpu).median:.2f}" for n in names)


def main(given: list[str] | None = None) -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of all ways in turn")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each way in a round")
    parser.add_argument("--steps", type=int, default=10, help="steps of the flow")
    parser.add_argument("--cores", type=int, default=1, help="cores that may be used")
    parser.add_argument("--no-compiler", action="store_true", help="leave torch.compile out")
    options = parser.parse_args(given)
    machine.use_cores(options.cores)
    torch.set_num_threads(options.cores)
    about = machine.describe()
    load = os.getloadavg()[0]
    print(f"{about['processor']}, {options.cores} cores, a load of {load:.1f} at the start")
    checkout = os.environ.get(FORK)
    if checkout is None:
        print(f"{FORK} names no checkout: without the fork")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder  # a first call finds nothing there
        named = Path(checkout) if checkout else None
        found = ways(SMALL, options.steps, named, compiler=not options.no_compiler)
    print("\n".join(policy_lines(found, options.rounds, options.seconds)), flush=True)
    print("\n".join(product_lines(options.rounds, min(options.seconds, 0.2))), flush=True)


if __name__ == "__main__":
    main()
