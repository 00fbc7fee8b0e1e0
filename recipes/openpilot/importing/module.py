"""An imported graph: a torch module that runs its steps in order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recipes.openpilot.contract import TensorSpec
from recipes.openpilot.importing.nodes import Call, Operand, Origin, Weight
from tpuport.foundation.errors import UsageError


@dataclass(frozen=True)
class Step:
    """One node of the graph.

    Attributes:
        op: Operator of the node.
        name: Name of the node, and of its module if it has one.
        call: Function of the module, if there is one, and the operands.
        is_module: Whether the step has a module.
        operands: Arguments of the call.
        outputs: Names of the results.
        shapes: Shapes of the outputs in the graph.
    """

    op: str
    name: str
    call: Call
    is_module: bool
    operands: tuple[Operand, ...]
    outputs: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def inputs(self) -> tuple[str, ...]:
        """Return the names of the values that the step takes."""
        return tuple(operand for operand in self.operands if isinstance(operand, str))


class ImportedGraph(nn.Module):
    """An ONNX graph as a torch module, for any number of rows at once.

    Modules and parameters have the names of the graph: a Gemm `/temporal_hydra/plan/Gemm` is the
    `nn.Linear` `temporal_hydra/plan/Gemm`. Other constants with more than one element are in
    `constants`. All floats are float32.

    Attributes:
        inputs: Inputs of the graph.
        outputs: Outputs of the graph.
        leads: Whether every input and output begins with an axis of 1, the batch of one that the
            graph is written for. Rows then take its place: (n, 12, 128, 256). Otherwise the axis of
            rows precedes the graph's axes: (n, 8).
        steps: The nodes in order.
        origins: Origins of parameters in the file, by their fqn.
    """

    def __init__(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        super().__init__()
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self.leads = all(spec.shape[:1] == (1,) for spec in (*inputs, *outputs))
        self.steps: list[Step] = []
        self.origins: dict[str, Origin] = {}
        self.constants = nn.ParameterDict()

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> Any:
        """Run the graph on rows.

        Args:
            *args: Inputs in the order of the graph; see `leads` for their shapes.
            **kwargs: Inputs by name.

        Returns:
            The output, or a dict by name if there are several, with rows as in the inputs.
        """
        names = [spec.name for spec in self.inputs]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        if set(given) != set(names) or len(args) > len(names):
            raise UsageError(f"inputs {sorted(given)} of {len(args)}: expected {names}")
        if self.leads:
            given = {name: value.unsqueeze(1) for name, value in given.items()}
        found = self.compute(given, [spec.name for spec in self.outputs])
        if self.leads:
            found = {name: value.squeeze(1) for name, value in found.items()}
        return found if len(self.outputs) > 1 else next(iter(found.values()))

    def compute(
        self, given: Mapping[str, torch.Tensor], wanted: Sequence[str]
    ) -> dict[str, torch.Tensor]:
        """Compute some values of the graph from others, by the steps between them.

        Args:
            given: Values by name, inputs or not, each (n, *its shape in the graph).
            wanted: Names of values.

        Returns:
            The values by name, each (n, *its shape in the graph).

        Raises:
            UsageError: They cannot be computed from what is given.
        """
        # Files keep weights in float16, and the import computes in float32.
        values = {n: v.float() if v.dtype == torch.float16 else v for n, v in given.items()}
        for step in self.between(given, wanted):
            taken = [self._taken(operand, values) for operand in step.operands]
            if step.is_module:
                taken.insert(0, self.get_submodule(step.name))
            result = step.call(*taken)
            several = result if isinstance(result, tuple) else (result,)
            values.update(zip(step.outputs, several, strict=False))
        return {name: values[name] for name in wanted}

    def _taken(self, operand: Operand, values: dict[str, torch.Tensor]) -> Any:
        if isinstance(operand, Weight):
            return self.constants[operand.name]
        return values[operand] if isinstance(operand, str) else operand

    def between(self, given: Iterable[str], wanted: Sequence[str]) -> list[Step]:
        """Return the steps that compute some values from others, in order.

        Raises:
            UsageError: They cannot be computed from what is given.
        """
        maker = {name: step for step in self.steps for name in step.outputs}
        needed: dict[int, Step] = {}
        given, open_ = set(given), list(wanted)
        while open_:
            name = open_.pop()
            if name in given:
                continue
            if name not in maker:
                raise UsageError(f"{name!r} is needed for {', '.join(wanted)}, and not given")
            step = maker[name]
            if id(step) not in needed:
                needed[id(step)] = step
                open_.extend(step.inputs)
        return [step for step in self.steps if id(step) in needed]

    def frozen_frontier(self, given: Iterable[str]) -> tuple[str, ...]:
        """Return the values with which training can begin.

        These are computed from some inputs alone by steps without trainable weights, and are used
        by other steps or are outputs.

        Args:
            given: Names of inputs, such as the images.
        """
        known = set(given)
        needed: dict[str, None] = {}
        for step in self.steps:
            if known.issuperset(step.inputs) and not self._is_trained(step):
                known.update(step.outputs)
            else:
                needed |= dict.fromkeys(name for name in step.inputs if name in known)
        outputs = [spec.name for spec in self.outputs if spec.name in known]
        return tuple(dict.fromkeys([*needed, *outputs]))

    def _is_trained(self, step: Step) -> bool:
        weights = [self.constants[o.name] for o in step.operands if isinstance(o, Weight)]
        if step.is_module:
            weights += list(self.get_submodule(step.name).parameters())
        return any(weight.requires_grad for weight in weights)

    def part_of(self, output: str, part: slice) -> str | None:
        """Return the value that is a given range of an output's last axis, or None."""
        maker = {name: step for step in self.steps for name in step.outputs}
        shapes = {spec.name: spec.shape for spec in self.inputs}
        for step in self.steps:
            shapes.update(zip(step.outputs, step.shapes, strict=True))
        name, start, stop = output, part.start or 0, part.stop
        while name in maker:
            step = maker[name]
            if (start, stop) == (0, shapes[name][-1]) and step.op != "Concat":
                if step.op not in ("Identity", "Cast"):
                    return name
            if step.op in ("Identity", "Cast"):
                name = step.inputs[0]
                continue
            if step.op != "Concat":
                return None
            place = 0
            for piece in step.operands:
                width = self._width(piece, shapes)
                if isinstance(piece, str) and place <= start and stop <= place + width:
                    name, start, stop = piece, start - place, stop - place
                    break
                place += width
            else:
                return None
        return None

    def _width(self, operand: Operand, shapes: Mapping[str, tuple[int, ...]]) -> int:
        if isinstance(operand, Weight):
            return self.constants[operand.name].shape[-1]
        assert isinstance(operand, str | torch.Tensor)
        return shapes[operand][-1] if isinstance(operand, str) else operand.shape[-1]
