"""An imported graph: a torch module that runs its steps in order."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from recipes.openpilot.contract import TensorSpec
from recipes.openpilot.importing.nodes import Call, Operand, Origin, Weight
from tpuport.errors import UsageError


@dataclass(frozen=True)
class Step:
    """One node.

    Attributes:
        op: its operator.
        name: its name; that of its module, if it is one.
        call: of the module, if it is one, and the operands.
        is_module: whether it is.
        operands: what it takes.
        outputs: the names of what it gives.
        shapes: of the outputs in the graph.
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
        """The names of the values that it takes."""
        return tuple(operand for operand in self.operands if isinstance(operand, str))


class ImportedGraph(nn.Module):
    """An ONNX graph as a torch module, for any number of rows at once.

    Modules and parameters have the names of the graph: a Gemm `/temporal_hydra/plan/Gemm` is the
    `nn.Linear` `temporal_hydra/plan/Gemm`; other constants of more than one number are in
    `constants`. All floats are float32.

    Attributes:
        inputs: of the graph.
        outputs: of the graph.
        leads: whether every input and output begins with an axis of 1, which is the batch of one
            that the graph runs. Rows then take its place: (n, 12, 128, 256). Else they come before
            the graph's axes: (n, 8).
        steps: the nodes in order.
        origins: where parameters are in the file, by their fqn.
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
            *args: inputs in the order of the graph; see `leads` for their shapes.
            **kwargs: inputs by name.

        Returns:
            The output, or a dict by name where there are several; with rows as inputs have them.
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
        """Some values of the graph from some others, by the steps that lie between.

        Args:
            given: values by name, inputs or not, each (n, *its shape in the graph).
            wanted: names of values.

        Returns:
            By name, each (n, *its shape in the graph).

        Raises:
            UsageError: they do not follow from what is given.
        """
        # Halves, in which files are kept, are computed in single precision.
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
        """The steps that compute some values from others, in order.

        Raises:
            UsageError: they do not follow from what is given.
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
        """The values with which training can begin: what follows from some inputs alone by steps
        without anything to train, and is needed beyond them.

        Args:
            given: names of inputs, such as the images.
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
        """The value that makes up a range of the last axis of an output, if one does."""
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
