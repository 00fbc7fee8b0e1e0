"""Small programs of the recipes: equal to eager PyTorch, and as fast as the estimate says?"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import tpuport
from tpuport.compat.runner.target import load_target
from tpuport.foundation.errors import UsageError
from tpuport.measurement.bench import Bench
from tpuport.measurement.records import Quantity, Result

# What a recipe calls the file with its smallest program.
FILE = "smallest.py"
FUNCTION = "program"


def recipes_here(folder: Path) -> list[str]:
    """Return the smallest programs of the recipes below a folder, as targets."""
    found = sorted(folder.glob(f"recipes/*/{FILE}"))
    return [f"recipes.{path.parent.name}.{path.stem}:{FUNCTION}" for path in found]


def measure(target: str, bench: Bench) -> Iterator[Result]:
    """Port a program, compare it with eager PyTorch, and time it against the estimate.

    Raises:
        UsageError: The target returns something else than `tpuport compile` takes.
        PortError: It cannot be ported, or is not equal.
    """
    given = load_target(target)()
    if not isinstance(given, dict) or {"model", "inputs"} - given.keys():
        raise UsageError(f'{target}: expected a dict with "model" and "inputs"')
    args, kwargs = _arguments(given["inputs"])
    ported = tpuport.convert(given["model"])
    ported(*args, **kwargs)
    job = f"program {name_of(target)}"
    worst = ported.report.worst
    if worst is not None:
        words = f"{worst.path}, relative to eager PyTorch on the CPU"
        yield Result(
            job,
            f"{name_of(target)}, error",
            Quantity.ERROR,
            worst.max_rel,
            "",
            worst.tolerance,
            words,
        )
    seconds = _seconds(ported, args, kwargs, bench)
    expected, words = _estimate(ported, args, kwargs, bench)
    yield Result(job, f"{name_of(target)}, a call", Quantity.SECONDS, seconds, "s", expected, words)


def name_of(target: str) -> str:
    """Return a target's name: that of the recipe, or as it was given."""
    parts = target.partition(":")[0].split(".")
    return parts[1] if parts[0] == "recipes" and len(parts) == 3 else target


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    match inputs:
        case dict():
            return (), inputs
        case (tuple() as args, dict() as kwargs):
            return args, kwargs
        case tuple():
            return inputs, {}
        case other:
            return (other,), {}


def _seconds(ported: Any, args: Any, kwargs: Any, bench: Bench) -> float:
    """Return the time of a call within a loop, each call after the one before."""
    leaves, tree = jax.tree.flatten(_as_jax((args, kwargs)))
    arrays = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    real = [i for i in arrays if jnp.issubdtype(leaves[i].dtype, jnp.floating)]

    def step(carry: Any, params: Any, buffers: Any, key: Any, given: Any) -> Any:
        filled = list(leaves)
        for i, array in zip(arrays, given, strict=True):
            # What a call is given depends on the call before, so that no call is left out.
            filled[i] = array + (carry * 1e-30).astype(array.dtype) if i in real else array
        args, kwargs = jax.tree.unflatten(tree, filled)
        out, _ = ported.apply(params, buffers, key, *args, **kwargs)
        first = jax.tree.leaves(jax.lax.optimization_barrier(out))[0]
        return first.ravel()[0].astype(jnp.float32)

    given = [leaves[i] for i in arrays]
    consts = (ported.params, ported.buffers, jax.random.key(0), given)
    return bench.seconds(step, jnp.float32(0), *consts)


def _as_jax(tree: Any) -> Any:
    import torch

    return jax.tree.map(
        lambda leaf: (
            jnp.asarray(tpuport.to_numpy(leaf)) if isinstance(leaf, torch.Tensor) else leaf
        ),
        tree,
    )


def _estimate(ported: Any, args: Any, kwargs: Any, bench: Bench) -> tuple[float | None, str]:
    """Return the estimated time of a call on one device, or why there is none."""
    if bench.device.platform != "tpu":
        return None, "only a TPU has an estimate"
    mesh = Mesh(np.array(bench.devices[:1]), ("data",))
    report = tpuport.compile_for(ported, inputs=(args, kwargs), mesh=mesh, rules="ddp")
    if report.estimate is None:
        missing = report.work.unknown if report.work is not None else ()
        return None, "no estimate: " + ("; ".join(missing) or report.refused or "not known")
    return report.estimate.seconds, "what compile_for estimates, without the start of a program"
