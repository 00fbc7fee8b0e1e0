"""The contract of a driving model file: its inputs, its outputs, and the slice of each head.

Everything is read from the ONNX file itself. The heads are in its metadata, `output_slices`: a
base64 pickle of {name: slice}, read as in openpilot's selfdrive/modeld/get_model_metadata.py.
"""

import base64
import binascii
import io
import pickle
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.foundation.errors import CheckpointError

if TYPE_CHECKING:
    import onnx

STATE, NEXT_STATE = "state_", "next_state_"
# A table of slices is never larger than this.
_MOST_BYTES = 1 << 20

_NAMES = {1: "float32", 2: "uint8", 3: "int8", 6: "int32", 7: "int64", 9: "bool", 10: "float16"}


class Kind(StrEnum):
    """The part of driving that a file computes."""

    VISION = "vision"  # images to hidden_state and what is seen; 0.9.8 to 0.10.3
    POLICY = "policy"  # the buffer of features to plan; 0.9.8 to 0.10.3
    SUPERCOMBO = "supercombo"  # both in one graph; up to 0.9.7 and from July 2026
    STATEFUL = "stateful"  # both, with its queues as `state_*` and `next_state_*`; September 2026


@dataclass(frozen=True)
class TensorSpec:
    """One input or output of a graph.

    Attributes:
        name: Name in the graph.
        shape: Shape in the graph. A leading dim that the file leaves open is 1, the size that
            modeld runs.
        dtype: Dtype as numpy names it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ModelContract:
    """The contract between a model file and the code that runs it.

    Attributes:
        kind: The part of driving that it computes.
        inputs: Inputs in the order of the graph.
        outputs: Outputs in the order of the graph.
        slices: Slice of each head along the last dim of the first output.
        opset: Opset of ONNX's own operators.
        metadata: All metadata of the file.
    """

    kind: Kind
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    slices: Mapping[str, slice]
    opset: int
    metadata: Mapping[str, str] = field(repr=False)

    def input(self, name: str) -> TensorSpec | None:
        """Return the input of that name, or None."""
        return next((spec for spec in self.inputs if spec.name == name), None)

    @property
    def images(self) -> tuple[str, ...]:
        """Return the names of the inputs that are images: road camera, wide camera."""
        return tuple(spec.name for spec in self.inputs if spec.name in _IMAGES)

    @property
    def width(self) -> int:
        """Return the width of the first output."""
        return self.outputs[0].shape[-1]

    @property
    def feature_len(self) -> int:
        """Return the width of a frame's feature."""
        buffer = self.input("features_buffer") or self.input("state_feat_q")
        if buffer is not None:
            return buffer.shape[-1]
        head = self.slices["hidden_state"]
        return head.stop - head.start


_IMAGES = ("img", "big_img", "input_imgs", "big_input_imgs")
# The allowed shapes of each input; None is any size.
_SHAPES: dict[str, tuple[tuple[int | None, ...], ...]] = {
    **dict.fromkeys(_IMAGES, ((1, 12, 128, 256),)),
    "desire": ((1, 100, 8), (1, 25, 8), (8,)),
    "desire_pulse": ((1, 25, 8),),
    "traffic_convention": ((1, 2),),
    "lateral_control_params": ((1, 2),),
    "prev_desired_curv": ((1, 100, 1), (1, 25, 1)),
    "features_buffer": ((1, 99, None), (1, 24, None), (1, 25, None)),
    "action_t": ((1, 2),),
    "new_img": ((2, 6, 128, 256),),
    "state_img_q": ((2, 5, 6, 128, 256),),
    "state_desire_q": ((None, 1, 8),),
    "state_feat_q": ((None, 1, None),),
}
_WHAT_TO_DO = (
    "What to do: give a driving model of openpilot 0.9.7 or later as its release has it (a git LFS"
    " pointer is not the file), or one that make-data wrote"
)


class _SliceUnpickler(pickle.Unpickler):
    """An unpickler that makes slices and rejects everything else that is named."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("builtins", "slice"), ("__builtin__", "slice")}:
            return slice
        raise pickle.UnpicklingError(f"it names {module}.{name}, and only slices are read")


def read_slices(text: str) -> dict[str, slice]:
    """Read the table of heads, {name: slice}, from its metadata text by base64 and pickle.

    Raises:
        CheckpointError: It is damaged, names anything but `slice`, or is no such table.
    """
    if len(text) > _MOST_BYTES:
        raise CheckpointError(f"output_slices has {len(text)} bytes: a table of slices is small")
    try:
        found: Any = _SliceUnpickler(io.BytesIO(base64.b64decode(text))).load()
    except (binascii.Error, pickle.UnpicklingError, EOFError, *_DAMAGED) as error:
        raise CheckpointError(
            f"the metadata output_slices was not read: {type(error).__name__}: {error}. Nothing of"
            " it was executed. What to do: take the file from where openpilot publishes it; its"
            " output_slices is a base64 pickle of {name: slice}"
        ) from error
    if not isinstance(found, dict) or not found:
        raise CheckpointError(
            f"the metadata output_slices is {type(found).__name__} {_short(found)}: expected a"
            " dict of {name: slice}"
        )
    for name, part in found.items():
        if not (isinstance(name, str) and _is_range(part)):
            raise CheckpointError(
                f"output_slices[{_short(name)}] is {_short(part)}: expected a slice of"
                " integers, such as slice(0, 990, None)"
            )
    return found


# Long or deeply nested values of an untrusted file are abbreviated.
_short = reprlib.repr

# Errors that a damaged pickle causes in the unpickler, besides its own.
_DAMAGED = (*(ValueError, TypeError, IndexError, KeyError), *(AttributeError, OverflowError))


def _is_range(part: Any) -> bool:
    if not isinstance(part, slice) or part.step not in (None, 1):
        return False
    if type(part.start) not in (int, type(None)) or type(part.stop) is not int:
        return False
    return 0 <= (part.start or 0) < part.stop


def write_slices(slices: Mapping[str, slice]) -> str:
    """Return the metadata text of a table of heads, which `read_slices` and openpilot read."""
    return base64.encodebytes(pickle.dumps(dict(slices), protocol=4)).decode("ascii")


def load_onnx(path: str | Path) -> "onnx.ModelProto":
    """Load the graph and weights of an ONNX file.

    Raises:
        CheckpointError: There is no such file, or it is no ONNX file.
    """
    import onnx
    from google.protobuf.message import DecodeError

    path = Path(path)
    try:
        with path.open("rb") as file:
            start = file.read(64)
        if start.startswith(b"version https://git-lfs"):
            raise CheckpointError(
                f"{path} is a git LFS pointer, not the model. What to do: fetch the file itself"
                " (`git lfs pull`)"
            )
        model = onnx.load(path)
    except (OSError, DecodeError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} was not read as ONNX: {type(error).__name__}: {error}. {_WHAT_TO_DO}"
        ) from error
    if not model.graph.node:
        raise CheckpointError(f"{path} was read as ONNX and has no nodes. {_WHAT_TO_DO}")
    return model


def opset_of(model: "onnx.ModelProto") -> int:
    """Return the opset of ONNX's own operators in which a file is written."""
    return next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)


def tensor_specs(model: "onnx.ModelProto") -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return a graph's inputs (without initialisers) and outputs.

    Raises:
        CheckpointError: A dim other than the first is open, or a type is not that of a tensor.
    """
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = tuple(_spec(value) for value in model.graph.input if value.name not in weights)
    return inputs, tuple(_spec(value) for value in model.graph.output)


def _spec(value: Any) -> TensorSpec:
    kind = value.type.tensor_type
    if kind.elem_type not in _NAMES:
        raise CheckpointError(
            f"{value.name!r} has ONNX's element type {kind.elem_type}: expected one of"
            f" {', '.join(_NAMES.values())}"
        )
    shape = []
    for axis, dim in enumerate(kind.shape.dim):
        size = dim.dim_value if dim.HasField("dim_value") else -1
        if size < 0 and axis:
            raise CheckpointError(
                f"dim {axis} of {value.name!r} is open ({dim.dim_param or 'no size'}): only the"
                " first may be. What to do: fix it, with onnx.tools.update_model_dims"
            )
        shape.append(1 if size < 0 else size)
    return TensorSpec(value.name, tuple(shape), _NAMES[kind.elem_type])


def read_contract(model: "str | Path | onnx.ModelProto") -> ModelContract:
    """Read and check the contract of a driving model.

    Args:
        model: The file, or the result of `load_onnx`.

    Raises:
        CheckpointError: It is not a driving model of a known generation, or is damaged.
    """
    name = "the model"
    if isinstance(model, str | Path):
        name, model = str(model), load_onnx(model)
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    if "output_slices" not in metadata:
        raise CheckpointError(
            f"{name} has no metadata output_slices, only {sorted(metadata) or 'none at all'}: where"
            f" its heads are is not known. {_WHAT_TO_DO}"
        )
    try:
        inputs, outputs = tensor_specs(model)
        slices = read_slices(metadata["output_slices"])
        _check_inputs(inputs)
        _check_outputs(inputs, outputs, slices)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    return ModelContract(_kind(inputs), inputs, outputs, slices, opset_of(model), metadata)


def _kind(inputs: tuple[TensorSpec, ...]) -> Kind:
    names = {spec.name for spec in inputs}
    if any(name.startswith(STATE) for name in names):
        return Kind.STATEFUL
    if "features_buffer" not in names:
        return Kind.VISION
    return Kind.SUPERCOMBO if names & set(_IMAGES) else Kind.POLICY


def _check_inputs(inputs: tuple[TensorSpec, ...]) -> None:
    for spec in inputs:
        if spec.name not in _SHAPES:
            known = ", ".join(sorted(_SHAPES))
            raise CheckpointError(
                f"the input {spec.name!r} {spec.shape} is of no generation that is known. Known"
                f" inputs: {known}. {_WHAT_TO_DO}"
            )
        if not any(_fits(spec.shape, shape) for shape in _SHAPES[spec.name]):
            wanted = " or ".join(str(shape).replace("None", "any") for shape in _SHAPES[spec.name])
            raise CheckpointError(
                f"the input {spec.name!r} is {spec.shape}: expected {wanted}. {_WHAT_TO_DO}"
            )
    if not {spec.name for spec in inputs} & {*_IMAGES, "features_buffer", "new_img"}:
        raise CheckpointError(
            f"it takes no images and no features, only {[spec.name for spec in inputs]}."
            f" {_WHAT_TO_DO}"
        )


def _fits(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    return len(shape) == len(wanted) and all(
        w is None or size == w for size, w in zip(shape, wanted, strict=True)
    )


def _check_outputs(
    inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...], slices: Mapping[str, slice]
) -> None:
    first = outputs[0]
    if len(first.shape) != 2 or first.shape[0] != 1:
        raise CheckpointError(
            f"the output {first.name!r} is {first.shape}: expected (1, all heads). {_WHAT_TO_DO}"
        )
    for name, part in slices.items():
        if part.stop > first.shape[-1]:
            raise CheckpointError(
                f"output_slices[{name!r}] is {part.start or 0}:{part.stop}, and the output"
                f" {first.name!r} has {first.shape[-1]} numbers: graph and metadata are of"
                f" different models. {_WHAT_TO_DO}"
            )
    by_name = {spec.name: spec for spec in inputs}
    buffer = by_name.get("features_buffer") or by_name.get("state_feat_q")
    head = slices.get("hidden_state")
    if head is not None and buffer is not None:
        width = head.stop - (head.start or 0)
        if width != buffer.shape[-1]:
            raise CheckpointError(
                f"hidden_state has {width} numbers, and {buffer.name} takes {buffer.shape[-1]}."
                f" {_WHAT_TO_DO}"
            )
    states = {spec.name: spec for spec in inputs if spec.name.startswith(STATE)}
    nexts = {s.name.removeprefix("next_"): s for s in outputs if s.name.startswith(NEXT_STATE)}
    for name in sorted({*states, *nexts}):
        given, after = states.get(name), nexts.get(name)
        if (
            given is None
            or after is None
            or (given.shape, given.dtype) != (after.shape, after.dtype)
        ):
            raise CheckpointError(
                f"the state {name!r} goes in as {_shown(given)} and comes out as {_shown(after)}:"
                f" expected the same. {_WHAT_TO_DO}"
            )


def _shown(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.dtype} {spec.shape}"
