"""Import of an ONNX file as an `ImportedGraph`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from recipes.openpilot.contract import load_onnx, opset_of, tensor_specs
from recipes.openpilot.importing import (
    elementwise,
    normalising,
    pooling,
    products,
    recurrent,
    reducing,
    shaping,
)
from recipes.openpilot.importing.module import ImportedGraph, Step
from recipes.openpilot.importing.nodes import (
    BUILDERS,
    DTYPES,
    Built,
    Constant,
    Node,
    Operand,
    Origin,
    Value,
    Variable,
    Weight,
    size,
)
from recipes.openpilot.importing.products import as_float
from tpuport.foundation.errors import CheckpointError

if TYPE_CHECKING:
    import onnx

# Importing these modules enters their operators in the table.
FAMILIES = (elementwise, normalising, pooling, products, recurrent, reducing, shaping)
OPSETS = range(9, 23)


def import_onnx(model: "str | Path | onnx.ModelProto") -> ImportedGraph:
    """Import an ONNX graph as a torch module that can be trained, for any number of rows.

    Constants are folded, weights of Gemm, MatMul and Conv become modules, and float16 becomes
    float32. Functions of the file are inlined.

    Args:
        model: The file, or the result of `load_onnx`.

    Raises:
        CheckpointError: An operator or a form of it is not supported (the message names the node
            and the opset), or the file is damaged.
    """
    if isinstance(model, str | Path):
        model = load_onnx(model)
    if model.functions:
        from onnx.inliner import inline_local_functions

        model = inline_local_functions(model)
    opset = opset_of(model)
    if opset not in OPSETS:
        raise CheckpointError(
            f"the graph is written in opset {opset}: expected {OPSETS[0]} to {OPSETS[-1]}. What to"
            " do: convert it with onnx.version_converter"
        )
    return _Importer(model, opset).run()


class _Importer:
    """An importer of one graph, with its values by name, its steps and their module."""

    def __init__(self, model: "onnx.ModelProto", opset: int) -> None:
        self.model, self.opset = model, opset
        inputs, self.outputs = tensor_specs(model)
        self.module = ImportedGraph(inputs, self.outputs)
        self.values: dict[str, Value] = {}
        self.examples: dict[str, torch.Tensor] = {}
        self.names: set[str] = set()
        # One parameter per constant, however many nodes use it.
        self.registered: dict[int, Weight | torch.Tensor] = {}
        self.tied: dict[Origin, tuple[nn.Parameter, str]] = {}
        self.kept: list[Constant] = []

    def run(self) -> ImportedGraph:
        """Import all nodes and return the module."""
        for tensor in self.model.graph.initializer:
            array = _numbers(tensor, tensor.name)
            self.values[tensor.name] = Constant(array, Origin(tensor.name, array.shape))
        for spec in self.module.inputs:
            kind = torch.float32 if "float" in spec.dtype else getattr(torch, spec.dtype)
            # Ones rather than zeros, since integers may be divisors.
            self._variable(spec.name, torch.ones(1, *spec.shape, dtype=kind))
        for number, node in enumerate(self.model.graph.node):
            self._add(node, number)
        for spec in self.outputs:
            self._check_output(spec.name, spec.shape)
        return self.module.eval()

    def _add(self, proto: Any, number: int) -> None:
        node = self._node(proto, number)
        if proto.domain not in ("", "ai.onnx"):
            raise node.refuse(f"the domain {proto.domain!r} is not ONNX's own")
        if node.op == "Constant":
            self._constant(node, proto)
            return
        if node.op in ("Shape", "Size"):
            self._shape(node, proto)
            return
        if any(a.type in (5, 10) for a in proto.attribute):
            raise node.refuse("an operator with a graph inside is not supported")
        if all(v is None or isinstance(v, Constant) for v in node.inputs):
            self._fold(node, proto)
            return
        if node.op not in BUILDERS:
            raise node.refuse("the operator is not supported")
        with torch.no_grad():
            self._step(node, BUILDERS[node.op](node), [name for name in proto.output if name])

    def _node(self, proto: Any, number: int) -> Node:
        from onnx import helper

        name = proto.name.strip("/").replace(".", "_") or f"{proto.op_type}_{number}"
        while name in self.names or hasattr(self.module, name):  # such as "half", a method
            name += "_"
        self.names.add(name)
        attributes = {a.name: _plain(helper.get_attribute_value(a)) for a in proto.attribute}
        missing = [n for n in proto.input if n and n not in self.values]
        node = Node(
            proto.op_type,
            name,
            attributes,
            [self.values[n] if n and n in self.values else None for n in proto.input],
            len([name for name in proto.output if name]),
            self.opset,
            self._register,
        )
        if missing:
            raise node.refuse(f"its input {missing[0]!r} is not there: the file is damaged")
        return node

    # -- what is known -----------------------------------------------------------------------------

    def _constant(self, node: Node, proto: Any) -> None:
        (name,) = proto.output
        if "value" in node.attributes:
            array = _numbers(node.attributes["value"], name)
        else:
            plain = {"value_float": np.float32, "value_floats": np.float32}
            plain |= {"value_int": np.int64, "value_ints": np.int64}
            found = [(k, v) for k, v in node.attributes.items() if k in plain]
            if not found:
                raise node.refuse(f"a constant of {', '.join(node.attributes)}")
            array = np.asarray(found[0][1], plain[found[0][0]])
        self.values[name] = Constant(array, Origin(name, array.shape))

    def _shape(self, node: Node, proto: Any) -> None:
        shape = node.value(0).shape
        if node.op == "Size":
            array = np.asarray(size(shape), np.int64)
        else:
            array = np.asarray(shape[node.attr("start", 0) : node.attr("end")], np.int64)
        self.values[proto.output[0]] = Constant(array)

    def _fold(self, node: Node, proto: Any) -> None:
        """Compute a node whose inputs are all constants."""
        import onnx
        from onnx.reference import ReferenceEvaluator

        given = {
            n: value.array
            for n, value in zip(proto.input, node.inputs, strict=True)
            if isinstance(value, Constant)
        }
        values = [onnx.ValueInfoProto(name=name) for name in given]
        outputs = [onnx.ValueInfoProto(name=name) for name in proto.output if name]
        graph = onnx.helper.make_graph([proto], "one", values, outputs)
        single = onnx.helper.make_model(graph, opset_imports=list(self.model.opset_import))
        try:
            found = ReferenceEvaluator(single).run(None, given)
        except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise node.refuse(f"it was not computed from constants: {error}") from error
        assert isinstance(found, list)
        for output, array in zip(outputs, found, strict=True):
            array = np.asarray(array)
            self.values[output.name] = Constant(array, _moved(node, array))

    def _register(self, constant: Constant) -> Weight | torch.Tensor:
        if id(constant) not in self.registered:
            self.kept.append(constant)  # keeps its id from being reused
            self.registered[id(constant)] = self._registered(constant)
        return self.registered[id(constant)]

    def _registered(self, constant: Constant) -> Weight | torch.Tensor:
        if constant.array.dtype.kind != "f":
            return torch.from_numpy(np.array(constant.array))
        known = constant.origin.name if constant.origin is not None else "folded"
        name = known.strip("/").replace(".", "/")
        while hasattr(self.module.constants, name):  # such as "half", a method
            name += "_"
        parameter = nn.Parameter(as_float(constant.array))
        parameter.requires_grad_(constant.origin is not None)
        self.module.constants[name] = parameter
        if constant.origin is not None:
            self.module.origins[f"constants.{name}"] = constant.origin
        return Weight(name)

    # -- what is computed --------------------------------------------------------------------------

    def _step(self, node: Node, built: Built, outputs: Sequence[str]) -> None:
        if built.module is not None:
            self.module.add_module(node.name, built.module)
            for name, origin in (built.origins or {}).items():
                self._trace(built.module, f"{node.name}.{name}", origin)
        taken = [self._example(operand) for operand in built.operands]
        if built.module is not None:
            taken.insert(0, built.module)
        try:
            result = built.call(*taken)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            raise node.refuse(f"it does not fit its inputs: {error}") from error
        several = result if isinstance(result, tuple) else (result,)
        for name, value in zip(outputs, several, strict=False):
            self._variable(name, value)
        self.module.steps.append(
            Step(
                node.op,
                node.name,
                built.call,
                built.module is not None,
                tuple(built.operands),
                tuple(outputs),
                tuple(self.values[name].shape for name in outputs),
            )
        )

    def _trace(self, module: nn.Module, fqn: str, origin: Origin | None) -> None:
        """Record the origin of a module's parameter in the file, and tie those of one origin."""
        last = fqn.rpartition(".")[2]
        parameter = module.get_parameter(last)
        if origin is None:
            parameter.requires_grad_(False)  # it could not be written back
            return
        self.module.origins[fqn] = origin
        if origin in self.tied:
            setattr(module, last, self.tied[origin][0])
        self.tied.setdefault(origin, (parameter, fqn))

    def _example(self, operand: Operand) -> Any:
        if isinstance(operand, Weight):
            return self.module.constants[operand.name]
        return self.examples[operand] if isinstance(operand, str) else operand

    def _variable(self, name: str, example: torch.Tensor) -> None:
        self.examples[name] = example
        self.values[name] = Variable(name, tuple(example.shape[1:]), example.dtype)

    def _check_output(self, name: str, declared: tuple[int, ...]) -> None:
        value = self.values.get(name)
        if not isinstance(value, Variable):
            raise CheckpointError(
                f"the output {name!r} does not depend on the inputs. What to do: give a model whose"
                " outputs are computed"
            )
        if value.shape != declared:
            raise CheckpointError(
                f"the output {name!r} is declared as {declared} and computed as {value.shape}: the"
                " file contradicts itself. What to do: take it from where it is published"
            )


def _numbers(tensor: Any, name: str) -> np.ndarray:
    """Return a tensor of the file as an array.

    Raises:
        CheckpointError: Its data do not fit its shape.
    """
    from onnx import numpy_helper

    try:
        return numpy_helper.to_array(tensor)
    except (ValueError, TypeError) as error:
        raise CheckpointError(
            f"the tensor {name!r} is declared as {tuple(tensor.dims)} and was not read: {error}."
            " What to do: the file is damaged, take it from where it is published"
        ) from error


def _plain(value: Any) -> Any:
    """Return an attribute's value with bytes decoded to str."""
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, list) and value and isinstance(value[0], bytes):
        return [item.decode("utf-8") for item in value]
    return value


# Operators after which a constant has the same values as in the file, in another shape.
_SHAPES = {"Identity", "Reshape", "Unsqueeze", "Squeeze", "Flatten"}


def _moved(node: Node, array: np.ndarray) -> Origin | None:
    """Return the origin of a folded constant in the file, or None if it was computed."""
    source = node.value(0) if node.inputs else None
    if not isinstance(source, Constant) or source.origin is None:
        return None
    if node.op == "Transpose":
        perm = node.attr("perm") or tuple(reversed(range(source.array.ndim)))
        return source.origin.permuted(perm)
    if (
        node.op == "Cast"
        and source.array.dtype.kind == "f"
        and DTYPES.get(node.attr("to")) == torch.float32
    ):
        return source.origin
    return source.origin.reshaped(array.shape) if node.op in _SHAPES else None
