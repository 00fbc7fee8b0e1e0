"""A ported call as a folder that needs neither tpuport nor torch: StableHLO and safetensors."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import torch

from tpuport.aot.entry_points import as_call
from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError, UsageError
from tpuport.foundation.files import write_atomically
from tpuport.foundation.interop import backend
from tpuport.foundation.version import __version__
from tpuport.model import pure
from tpuport.model.lowering import flatten_call
from tpuport.model.ported_model import PortedModel
from tpuport.model.program_cache import CallArguments
from tpuport.tracing.core import arguments
from tpuport.tracing.scan_layers.stacked_params import refuse_stacks
from tpuport.tracing.state.request import TraceRequest, TraceResult
from tpuport.weights import save_checkpoint

PROGRAM, WEIGHTS, MANIFEST, LOADER = (
    *("program.stablehlo", "weights.safetensors", "manifest.json"),
    "load_program.py",
)
_PLATFORMS = ("cpu", "tpu", "cuda", "rocm")


def export(
    ported: PortedModel,
    path: str | Path,
    *,
    inputs: Any,
    method: str = "forward",
    platforms: Sequence[str] = ("cpu", "tpu"),
) -> None:
    """Write a call of a ported model to a folder that jax alone can load and run.

    The folder has the program as `jax.export` serializes StableHLO, the weights in safetensors, a
    manifest in JSON, and `load_program.py`, which imports jax and no part of tpuport:

        program = load_program.load("folder")
        y = program(x)  # arrays in the order of program.arguments

    A program for the TPU alone has tpuport's kernels. One for several platforms has none.

    Args:
        ported: Made by `tpuport.convert`, with weights.
        path: The folder; it is made, and an earlier export in it is replaced.
        inputs: A tuple of positional arguments, a dict of keyword arguments, or a pair of both.
            Shapes are enough for tensors; everything else is part of the program.
        method: The method to export.
        platforms: Where it is to run, of cpu, tpu, cuda, rocm.

    Raises:
        PortError: The code cannot be ported exactly, or the call changes more than the model's own
            tensors: its arguments, or Python values.
        UsageError: An argument is wrong, or the folder holds something else.
    """
    unknown = [name for name in platforms if name not in _PLATFORMS]
    if unknown or not platforms:
        raise UsageError(f"platforms: expected some of {', '.join(_PLATFORMS)}, got {platforms!r}")
    folder = Path(path)
    if folder.exists() and any(folder.iterdir()) and not (folder / MANIFEST).is_file():
        raise UsageError(f"{folder} holds other files. Name another folder.")
    state = {**ported.buffers, **ported.params}
    refuse_stacks(state, "exporting it")
    if any(not isinstance(value, jax.Array) for value in state.values()):
        raise UsageError("export needs the weights; this model is on the meta device.")
    target = platforms[0] if len(platforms) == 1 else "cpu"
    made = ported._copy(ported.params, ported.buffers, target=target)
    exported, outcome, call = _exported(made, state, method, as_call(inputs), platforms)
    _refuse_changes(outcome)
    manifest = _manifest(outcome, call, state, method, platforms)
    folder.mkdir(parents=True, exist_ok=True)
    # The manifest makes it a program: it goes first when one is replaced, and comes last.
    (folder / MANIFEST).unlink(missing_ok=True)
    save_checkpoint(folder / WEIGHTS, state)
    write_atomically(folder / PROGRAM, bytes(exported.serialize()))
    shutil.copyfile(Path(__file__).with_name(LOADER), folder / LOADER)
    write_atomically(folder / MANIFEST, json.dumps(manifest, indent=1).encode())


def _exported(
    ported: PortedModel,
    state: dict[str, jax.Array],
    method: str,
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
    platforms: Sequence[str],
) -> tuple[jax.export.Exported, TraceResult, CallArguments]:
    call = flatten_call(*inputs)
    held: dict[str, TraceResult] = {}

    def program(state: dict[str, jax.Array], seed: jax.Array, values: list[jax.Array]) -> Any:
        key = jax.random.wrap_key_data(seed)
        request = TraceRequest(method, state, key, values, call.metas, call.spec, checks=True)
        with ported._precision_scope():
            outcome = held["outcome"] = pure.traced(ported, request, state)
        leaves = arguments.static_leaves(outcome.out_leaves, outcome.out_metas)
        changed = {name: outcome.state[name] for name in sorted(outcome.changed)}
        return leaves, changed, outcome.code

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (state, call.values))
    seed = jax.ShapeDtypeStruct((2,), "uint32")
    made = jax.export.export(jax.jit(program), platforms=platforms)(shapes[0], seed, shapes[1])
    return made, held["outcome"], call


def _refuse_changes(outcome: TraceResult) -> None:
    changes = {
        "its arguments": bool(outcome.mutated) or outcome.argument_changes is not None,
        "Python values": outcome.python_changes is not None,
    }
    found = [what for what, changed in changes.items() if changed]
    if found:
        raise PortError(
            f"The call changes {' and '.join(found)}, which a program in a folder cannot do. What"
            " to do: call a function that returns them instead (tpuport.convert takes functions)"
        )


def _manifest(
    outcome: TraceResult,
    call: CallArguments,
    state: dict[str, jax.Array],
    method: str,
    platforms: Sequence[str],
) -> dict[str, Any]:
    pairs = zip(call.paths, call.metas, strict=True)
    places = list(range(len(outcome.out_metas)))
    structure = pytree.unflatten(outcome.out_spec, [_Place(index) for index in places])
    return {
        "tpuport": __version__,
        "jax": jax.__version__,
        "method": method,
        "platforms": list(platforms),
        "arguments": [{"name": arguments.argument_name(p), **_described(m)} for p, m in pairs],
        "outputs": [_described(meta) for meta in outcome.out_metas],
        "structure": _as_json(structure),
        "state": {name: [str(value.dtype), list(value.shape)] for name, value in state.items()},
        "changes": sorted(outcome.changed),
        "random": outcome.uses_key,
        "errors": [
            f"{type(check.error).__name__}: {check.error}"
            for check in outcome.trace.recorder.checks
        ],
    }


def _described(meta: Any) -> dict[str, Any]:
    if not isinstance(meta, torch.Tensor):
        return {"number": str(getattr(meta, "__name__", meta))}
    dtype = str(backend.jax_dtype(meta.dtype))
    return {"dtype": dtype, "torch": str(meta.dtype).removeprefix("torch."), "shape": [*meta.shape]}


class _Place:
    """Stands for an output by its index."""

    def __init__(self, index: int) -> None:
        self.index = index


def _as_json(value: Any) -> Any:
    """Return an output's structure with each array as `{"output": index}`.

    Raises:
        UsageError: an object in it cannot be written as JSON.
    """
    if isinstance(value, _Place):
        return {"output": value.index}
    if value is None or type(value) in (bool, int, float, str):
        return {"value": value}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: _as_json(part) for key, part in value.items()}}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_as_json(part) for part in value]}
    raise UsageError(
        f"The call returns a {type(value).__name__}, which a manifest in JSON cannot describe. What"
        " to do: export a function that returns tensors, numbers, strings, lists, tuples and dicts"
    )
