"""Driving models with the real inputs, outputs and metadata of each generation.

Their weights are random, the same for the same seed, or in size `pretrained` those of `pretrain`.
"""

import ast
import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from recipes.openpilot.contract import read_contract, write_slices
from recipes.openpilot.generations import GENERATIONS, FileKind, example_inputs
from recipes.openpilot.small_model import PRETRAINED, build
from tpuport.foundation.errors import UsageError
from tpuport.foundation.files import replacing_file

if TYPE_CHECKING:
    import onnx

OPSETS = (18, 19, 20, 21)


def make_onnx(
    kind: FileKind, *, seed: int = 0, opset: int = 20, fp16: bool = False, size: str = "small"
) -> "onnx.ModelProto":
    """Return a model as an ONNX graph with its metadata.

    Args:
        kind: The file.
        seed: Random seed of its weights.
        opset: ONNX opset, 18 to 21.
        fp16: Whether weights and inputs that are no images are float16, as in published models.
        size: See `small_model.SIZES`.

    Raises:
        UsageError: torch writes no such opset, or there is no such size.
    """
    if opset not in OPSETS:
        raise UsageError(f"opset={opset}: expected one of {', '.join(map(str, OPSETS))}")
    dtype = torch.float16 if fp16 else torch.float32
    inputs = example_inputs(kind, dtype)
    outputs = ["outputs"]
    if kind.stateful:
        outputs += [f"next_{name}" for name in inputs if name.startswith("state_")]
    with _quietly():
        program = torch.onnx.export(
            build(kind, seed, size).to(dtype),
            tuple(inputs.values()),
            dynamo=True,
            opset_version=opset,
            input_names=list(inputs),
            output_names=outputs,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    _name_nodes(model)
    for key, value in {
        "output_slices": write_slices(kind.slices),
        "model_checkpoint": "drawn-roads/1"
        if size == PRETRAINED
        else f"random-weights/seed-{seed}",
    }.items():
        entry = model.metadata_props.add()
        entry.key, entry.value = key, value
    return model


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Silence torch's exporter.

    It warns that torchvision is missing, and of a deprecation in its own pytrees.
    """
    log = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning, module="copyreg|torch")
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            yield
    finally:
        log.setLevel(level)


def _name_nodes(model: "onnx.ModelProto") -> None:
    """Name nodes by their module, as in published models: `/policy/temporal_hydra/plan/2/Gemm`."""
    counts: Counter[str] = Counter()
    for node in model.graph.node:
        entries = {entry.key: entry.value for entry in node.metadata_props}
        scopes = ast.literal_eval(entries.get("pkg.torch.onnx.name_scopes", "['']"))
        # The last scope is the operation's own; the one before it is the module's.
        module = scopes[-2] if len(scopes) > 1 else ""
        name = "/".join(["", *(module.split(".") if module else []), node.op_type])
        counts[name] += 1
        node.name = name if counts[name] == 1 else f"{name}_{counts[name] - 1}"
        del node.metadata_props[:]
        node.doc_string = ""


def make_model(
    folder: str | Path,
    generation: str,
    *,
    seed: int = 0,
    opset: int = 20,
    fp16: bool = False,
    size: str = "small",
) -> list[Path]:
    """Write the model files of a generation.

    Args:
        folder: Folder to write to, created if it is missing.
        generation: One of `GENERATIONS`.
        seed: Random seed of the weights. The second file uses the next seed.
        opset: ONNX opset, 18 to 21.
        fp16: See `make_onnx`.
        size: See `make_onnx`.

    Returns:
        The files, vision before policy.

    Raises:
        UsageError: There is no such generation, opset or size.
        CheckpointError: A file cannot be written.
    """
    if generation not in GENERATIONS:
        raise UsageError(f"generation={generation!r}: expected one of {', '.join(GENERATIONS)}")
    folder, written = Path(folder), []
    folder.mkdir(parents=True, exist_ok=True)
    for number, kind in enumerate(GENERATIONS[generation]):
        model = make_onnx(kind, seed=seed + number, opset=opset, fp16=fp16, size=size)
        read_contract(model)
        path = folder / f"{kind.name}.onnx"
        with replacing_file(path) as temporary:
            temporary.write_bytes(model.SerializeToString())
        written.append(path)
    return written
