"""Export of a trained import back to ONNX: the original file with new weights.

The graph is not rewritten, so names, dtypes, opset, metadata and operators are those of the
original. Only the values of initialisers change.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from recipes.openpilot.contract import ModelContract, load_onnx, read_contract
from recipes.openpilot.importing import ImportedGraph, import_onnx
from recipes.openpilot.importing.nodes import Origin
from tpuport.foundation.errors import CheckpointError, UsageError
from tpuport.foundation.files import replacing_file

if TYPE_CHECKING:
    import onnx

# The allowed difference between onnxruntime and the module, relative to a head's largest number (or
# 1). A float16 file rounds each weight and each step to 11 bits.
TOLERANCES = {"float32": 1e-3, "float16": 1e-2}


@dataclass(frozen=True)
class ExportReport:
    """The result of an export.

    Attributes:
        path: The file.
        changed: Names of the initialisers whose values differ from the original's.
        largest_difference: Largest difference between onnxruntime and the module, relative to a
            head's largest number.
        tolerance: The allowed difference.
    """

    path: Path
    changed: tuple[str, ...]
    largest_difference: float
    tolerance: float


def write_weights(model: "onnx.ModelProto", module: ImportedGraph) -> list[str]:
    """Write a module's weights into the graph that it was imported from.

    Args:
        model: The original, changed in place. Weights that are equal keep their bytes.
        module: The module that `import_onnx` made of it, trained, without adapters.

    Returns:
        The names of the changed tensors.

    Raises:
        UsageError: The module is of another graph, or has adapters.
        CheckpointError: A weight is not finite, is too large for the file's dtype, or would need
            two different values.
    """
    wanted = _wanted(model, module)
    changed = []
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            values = [a.t for a in node.attribute if a.name == "value"]
            tensors |= dict.fromkeys(node.output, values[0]) if values else {}
    for name, (fqn, array) in wanted.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise UsageError(
                f"{fqn} is {name!r} in the file that it was imported from, and the original has no"
                " such tensor. What to do: give the file that the module was imported from"
            )
        changed += [name] if _write(tensor, fqn, array) else []
    return changed


def _wanted(model: "onnx.ModelProto", module: ImportedGraph) -> dict[str, tuple[str, np.ndarray]]:
    """Return each changed tensor of the file, with its parameter's fqn and its new value."""
    fresh = import_onnx(model)
    ours, theirs = dict(module.named_parameters()), dict(fresh.named_parameters())
    adapters = [name for name in ours if "lora_" in name]
    if adapters:
        raise UsageError(
            f"the module still has adapters ({adapters[0]} and others). What to do: merge them, by"
            " student.merge"
        )
    if {n: p.shape for n, p in ours.items()} != {n: p.shape for n, p in theirs.items()}:
        other = sorted({n for n in {**ours, **theirs} if n not in ours or n not in theirs})
        raise UsageError(
            f"the module was not imported from the original: {', '.join(other[:4]) or 'shapes'}"
            " differ. What to do: give the file that it was imported from"
        )
    found: dict[str, tuple[str, np.ndarray]] = {}
    changed: set[str] = set()
    for fqn, origin in fresh.origins.items():
        parameter = module.get_parameter(fqn)
        if not torch.equal(parameter.cpu(), fresh.get_parameter(fqn)):
            changed.add(origin.name)
        array = origin.undo(parameter.detach().float().cpu().numpy())
        if origin.name in found and not np.array_equal(found[origin.name][1], array):
            raise CheckpointError(
                f"{found[origin.name][0]} and {fqn} are one tensor {origin.name!r} in the file, and"
                " were trained to different values. What to do: train neither, or both as one"
            )
        found.setdefault(origin.name, (fqn, array))
    _check_untraced(ours, theirs, fresh.origins)
    return {name: value for name, value in found.items() if name in changed}


def _check_untraced(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], origins: Mapping[str, Origin]
) -> None:
    """Raise an error if a parameter that was computed from constants of the file has changed.

    Such a parameter cannot be written back.
    """
    for name, parameter in ours.items():
        if name not in origins and not torch.equal(parameter.cpu(), theirs[name]):
            raise CheckpointError(
                f"{name} was trained, and is not a tensor of the file but computed from some. What"
                " to do: do not train it"
            )


def _write(tensor: Any, fqn: str, array: np.ndarray) -> bool:
    """Set the values of a tensor in the file and return whether they changed."""
    from onnx import numpy_helper

    before = numpy_helper.to_array(tensor)
    if before.shape != array.shape:
        raise UsageError(f"{fqn} is {array.shape}, and {tensor.name!r} is {before.shape}")
    if np.array_equal(array, before.astype(np.float32), equal_nan=True):
        return False
    if not np.isfinite(array).all():
        raise CheckpointError(
            f"{fqn} was trained to numbers that are infinite or none: not written"
        )
    if before.dtype == np.float16 and np.abs(array).max() > np.finfo(np.float16).max:
        raise CheckpointError(
            f"{fqn} was trained to {np.abs(array).max():.3g}, and the file holds float16, up to"
            " 65504. What to do: train with a smaller learning rate or weight decay"
        )
    after = array.astype(before.dtype)
    for field in ("float_data", "int32_data", "double_data"):
        tensor.ClearField(field)
    tensor.raw_data = np.ascontiguousarray(after).tobytes()
    return not np.array_equal(after, before)


def export(
    module: ImportedGraph,
    original: str | Path,
    out: str | Path,
    *,
    rows: Sequence[Mapping[str, np.ndarray]],
    tolerance: float | None = None,
) -> ExportReport:
    """Write a trained module as the file that it was imported from, with its new weights.

    The file takes its final name only after onnxruntime computed the same with it as the module.

    Args:
        module: Trained module, with its adapters merged.
        original: The file that it was imported from.
        out: The file to write.
        rows: Real inputs to compare on, each as in the contract.
        tolerance: Allowed difference, by default from `TOLERANCES`.

    Raises:
        UsageError: The module is of another file, or there is nothing to compare on.
        CheckpointError: A weight cannot be written, the contract of the file would change,
            onnxruntime computes something else, or the disk is full.
    """
    out = Path(out)
    model = load_onnx(original)
    before = read_contract(model)
    if not rows:
        raise UsageError("rows is empty: expected real inputs to compare the file on")
    changed = write_weights(model, module)
    after = read_contract(model)
    if _promises(after) != _promises(before):
        raise CheckpointError(f"{out} was not written: it would promise other inputs or outputs")
    is_half = any(t.data_type == 10 and len(t.dims) > 1 for t in model.graph.initializer)
    allowed = TOLERANCES["float16" if is_half else "float32"] if tolerance is None else tolerance
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(out) as temporary:
        temporary.write_bytes(model.SerializeToString())
        worst, head = compare(module, temporary, before, rows)
        if not worst <= allowed:
            raise CheckpointError(
                f"{out} was not written: onnxruntime differs from the trained module by {worst:.2e}"
                f" of the largest number of {head!r}, and {allowed:.0e} is allowed. What to do: if"
                " the file is float16, look whether weights have grown large; else report it"
            )
    return ExportReport(out, tuple(changed), worst, allowed)


def _promises(contract: ModelContract) -> Any:
    slices = {name: (part.start, part.stop) for name, part in contract.slices.items()}
    metadata = dict(contract.metadata)
    return contract.inputs, contract.outputs, slices, contract.opset, metadata


def compare(
    module: ImportedGraph,
    path: str | Path,
    contract: ModelContract,
    rows: Sequence[Mapping[str, np.ndarray]],
) -> tuple[float, str]:
    """Measure how far onnxruntime with a file is from a module.

    Args:
        module: Module, run by torch on the CPU.
        path: The file.
        contract: Contract of the file.
        rows: Inputs as in the contract.

    Returns:
        The largest difference, relative to a head's largest number or to 1, and the head; infinite
        where one of the two is NaN.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(Path(path).read_bytes(), options)
    worst, where = 0.0, ""
    for row in rows:
        given = {s.name: np.asarray(row[s.name]).astype(s.dtype) for s in contract.inputs}
        expected = session.run(None, given)
        lead: Any = (lambda v: v) if module.leads else (lambda v: v[None])
        with torch.no_grad():
            found = module(**{n: torch.from_numpy(lead(v)) for n, v in given.items()})
        found = found if isinstance(found, dict) else {contract.outputs[0].name: found}
        for spec, value in zip(contract.outputs, expected, strict=True):
            mine = found[spec.name].numpy().reshape(spec.shape).astype(np.float64)
            first = spec is contract.outputs[0]
            parts = contract.slices if first else {spec.name: slice(None)}
            for name, part in parts.items():
                theirs = np.asarray(value)[..., part].astype(np.float64)
                size = max(1.0, float(np.abs(mine[..., part]).max(initial=0.0)))
                difference = float(np.abs(mine[..., part] - theirs).max(initial=0.0)) / size
                # NaN compares false with everything, so that the next head would replace it.
                difference = math.inf if math.isnan(difference) else difference
                if difference > worst:
                    worst, where = difference, name
    return worst, where
