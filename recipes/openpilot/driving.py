"""A driving model over time, with its queues as in the car.

Sources in commaai/openpilot: selfdrive/modeld/modeld.py of each release, and compile_modeld.py and
models/add_history.py of 2026. A frame is 0.05 s. The model takes entries 0.2 s apart from the
queues of features, desires and curvatures (since 0.9.8; before, all entries).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from recipes.openpilot.constants import DESIRE_LEN, FRAME_SHAPE, TEMPORAL_SKIP
from recipes.openpilot.contract import STATE, Kind, ModelContract, load_onnx, read_contract
from recipes.openpilot.importing import import_onnx
from tpuport.foundation.errors import UsageError
from tpuport.model.scanning import scan

Tensors = dict[str, torch.Tensor]
# The arrays of a training set that a model needs of each frame.
FRAME_INPUTS = ("img", "big_img", "desire", "traffic_convention", "v_ego", "action_t")
_RISES = 0.99


class Graph(Protocol):
    """An object that computes one file: an `ImportedGraph`, or onnxruntime."""

    def compute(self, given: Mapping[str, torch.Tensor], wanted: Sequence[str]) -> Tensors:
        """Compute values from values, each (n, *its shape in the graph)."""
        ...

    def frozen_frontier(self, given: Any) -> tuple[str, ...]:
        """Return the values with which training can begin."""
        ...


@dataclass(frozen=True)
class Timing:
    """The entries of its queues that a model takes.

    Attributes:
        stride: Frames between two entries, and between the two frames of an input.
        features: Number of entries in the buffer of features.
        has_current: Whether they include the feature of the current frame.
        desires: Number of entries of the desires.
    """

    stride: int
    features: int
    has_current: bool
    desires: int


def timing_of(contract: ModelContract) -> Timing:
    """Return the timing of a policy or supercombo, from the sizes of its inputs.

    Raises:
        UsageError: It has no desires or no features.
    """
    desire = contract.input("desire_pulse") or contract.input("desire")
    features = contract.input("features_buffer")
    if desire is None or features is None:
        raise UsageError(f"a model of {[s.name for s in contract.inputs]} has no queues to keep")
    # 100 entries are every frame of 5 s, 25 are every fourth.
    stride = 1 if desire.shape[1] == 100 else TEMPORAL_SKIP
    return Timing(stride, features.shape[1], contract.kind is Kind.POLICY, desire.shape[1])


class Driver(nn.Module):
    """A model of one or two files that is run frame by frame.

    Its output is that of the file, or the outputs of vision and policy joined; `slices` has the
    heads' ranges. All states and frames are batched, for n drives at once.

    Args:
        contracts: Contracts of the files, vision before policy.
        graphs: Graphs that compute the files.

    Attributes:
        slices: Slices of the joined output, without a second file's `pad`.
        remat: Whether frames are recomputed in the backward pass instead of kept.

    Raises:
        UsageError: The files are not those of one model.
    """

    def __init__(self, contracts: Sequence[ModelContract], graphs: Sequence[Graph]) -> None:
        super().__init__()
        kinds = [contract.kind for contract in contracts]
        if kinds not in ([Kind.VISION, Kind.POLICY], [Kind.SUPERCOMBO], [Kind.STATEFUL]):
            raise UsageError(
                f"files of kind {', '.join(kinds) or 'none'}: expected one supercombo, or vision"
                " and policy in this order"
            )
        self.contracts = tuple(contracts)
        modules = [graph for graph in graphs if isinstance(graph, nn.Module)]
        self.graphs: Any = nn.ModuleList(modules) if modules else list(graphs)
        self.kind = kinds[0]
        self.remat = False
        self.slices = dict(contracts[0].slices)
        for name, part in contracts[-1].slices.items() if len(contracts) > 1 else ():
            if name not in self.slices:
                start = contracts[0].width
                self.slices[name] = slice(start + (part.start or 0), start + part.stop)
        if self.kind is not Kind.STATEFUL:
            self.timing = timing_of(contracts[-1])
            if "hidden_state" not in self.slices:
                raise UsageError("the model has no hidden_state to keep in its buffer of features")

    @property
    def image_inputs(self) -> tuple[str, ...]:
        """Return the names of the first file's inputs that depend on the cameras only."""
        return ("new_img",) if self.kind is Kind.STATEFUL else self.contracts[0].images

    # -- states ------------------------------------------------------------------------------------

    def begin(self, rows: int) -> Tensors:
        """Return the state before the first frame, all zero as in the car.

        Args:
            rows: Number of drives.
        """
        if self.kind is Kind.STATEFUL:
            states = [s for s in self.contracts[0].inputs if s.name.startswith(STATE)]
            found = {s.name: torch.zeros(rows, *s.shape, dtype=_dtype(s.dtype)) for s in states}
            return {**found, "desire": torch.zeros(rows, DESIRE_LEN)}
        timing = self.timing
        stride, width = timing.stride, self.contracts[-1].feature_len
        past = (rows, stride, *FRAME_SHAPE)
        found = {
            "img": torch.zeros(past, dtype=torch.uint8),
            "big_img": torch.zeros(past, dtype=torch.uint8),
            "desire": torch.zeros(rows, DESIRE_LEN),
            "desires": torch.zeros(rows, stride * timing.desires, DESIRE_LEN),
            "features": torch.zeros(rows, stride * timing.features, width),
        }
        curvature = self.contracts[-1].input("prev_desired_curv")
        if curvature is not None:
            found["curvatures"] = torch.zeros(rows, stride * curvature.shape[1], 1)
        return found

    def images(self, state: Tensors, frames: Tensors) -> tuple[Tensors, Tensors]:
        """Return the image inputs for frames, and the images of the state after them.

        Args:
            state: State before the first frame.
            frames: `img` and `big_img` (t, n, 6, 128, 256), uint8.

        Returns:
            Inputs (t, n, *their shape in the graph), and the changed entries of the state.
        """
        if self.kind is Kind.STATEFUL:
            return {"new_img": torch.stack([frames["img"], frames["big_img"]], dim=2)}, {}
        found, after = {}, {}
        for name, camera in zip(self.contracts[0].images, ("img", "big_img"), strict=True):
            every = torch.cat([state[camera].transpose(0, 1), frames[camera]])
            count = len(frames[camera])
            pair = torch.cat([every[:count], every[-count:]], dim=2)
            spec = self.contracts[0].input(name)
            assert spec is not None
            found[name] = (pair if spec.dtype == "uint8" else pair.float()).unsqueeze(2)
            after[camera] = every[count:].transpose(0, 1)
        return found, after

    # -- frames ------------------------------------------------------------------------------------

    def see(self, images: Tensors) -> Tensors:
        """Run the frozen layers on images, up to the values that the trained layers need.

        Args:
            images: Image inputs, (..., *their shape in the graph).

        Returns:
            Values of the first file's graph, (..., *their shape in the graph).
        """
        lead = next(iter(images.values())).shape[:-4]
        if self.kind is Kind.STATEFUL:
            return images
        graph: Graph = self.graphs[0]
        last = len(lead) - 1
        # Drives are the outer axis, so that a sharded batch keeps each drive's frames on its
        # device.
        flat = {n: value.transpose(0, last).flatten(0, last) for n, value in images.items()}
        found = graph.compute(flat, graph.frozen_frontier(self.image_inputs))
        return {n: value.unflatten(0, lead[::-1]).transpose(0, last) for n, value in found.items()}

    def step(self, state: Tensors, seen: Tensors, frame: Tensors) -> tuple[Tensors, torch.Tensor]:
        """Compute one frame from the values of `see`.

        Args:
            state: State before the frame.
            seen: Result of `see`, each (n, ...).
            frame: `desire` (n, 8) as logged, `traffic_convention` (n, 2), `v_ego` (n,) in m/s,
                `action_t` (n, 2) in s.

        Returns:
            The state after it except for its images, and the output (n, all heads).
        """
        desire = frame["desire"].clone()
        desire[:, 0] = 0
        pulse = torch.where(desire - state["desire"] > _RISES, desire, torch.zeros_like(desire))
        if self.kind is Kind.STATEFUL:
            return self._stateful(state, seen, frame, desire, pulse)
        timing = self.timing
        desires = torch.cat([state["desires"][:, 1:], pulse.unsqueeze(1)], dim=1)
        pooled = desires.unflatten(1, (timing.desires, timing.stride)).amax(2)
        after = {**state, "desire": desire, "desires": desires}
        given = {
            "desire": pooled,
            "desire_pulse": pooled,
            "traffic_convention": frame["traffic_convention"],
            "action_t": frame["action_t"],
            "lateral_control_params": torch.stack([frame["v_ego"], frame["action_t"][:, 0]], dim=1),
        }
        newest = slice(timing.stride - 1, None, timing.stride)
        if "curvatures" in state:
            given["prev_desired_curv"] = state["curvatures"][:, newest]
        if timing.has_current:
            first = self._output(0, seen)
            features = _pushed(state["features"], first[:, self.slices["hidden_state"]])
            given["features_buffer"] = features[:, newest]
            out = torch.cat([first, self._output(1, self._inputs(1, given))], dim=1)
        else:
            given["features_buffer"] = state["features"][:, :: timing.stride]
            out = self._output(0, {**seen, **self._inputs(0, given)})
            features = _pushed(state["features"], out[:, self.slices["hidden_state"]])
        after["features"] = features
        if "curvatures" in state:
            start = self.slices["desired_curvature"].start
            after["curvatures"] = _pushed(state["curvatures"], out[:, start : start + 1])
        return after, out

    def _inputs(self, number: int, given: Tensors) -> Tensors:
        """Return the inputs that a file has, with the graph's own batch axis of one."""
        return {
            spec.name: given[spec.name].unsqueeze(1)
            for spec in self.contracts[number].inputs
            if spec.name in given
        }

    def _output(self, number: int, given: Tensors) -> torch.Tensor:
        name = self.contracts[number].outputs[0].name
        return self.graphs[number].compute(given, [name])[name].squeeze(1)

    def _stateful(
        self,
        state: Tensors,
        seen: Tensors,
        frame: Tensors,
        desire: torch.Tensor,
        pulse: torch.Tensor,
    ) -> tuple[Tensors, torch.Tensor]:
        inner = {name: value for name, value in state.items() if name.startswith(STATE)}
        given = {
            **seen,
            **inner,
            "desire": pulse,
            "traffic_convention": frame["traffic_convention"].unsqueeze(1),
            "action_t": frame["action_t"].unsqueeze(1),
        }
        outputs = [spec.name for spec in self.contracts[0].outputs]
        found = self.graphs[0].compute(given, outputs)
        after = {name: found[f"next_{name}"] for name in inner}
        return {**after, "desire": desire}, found[outputs[0]].squeeze(1)

    def forward(
        self,
        state: Tensors,
        frames: Tensors,
        seen: Tensors | None = None,
        stops: torch.Tensor | None = None,
    ) -> tuple[Tensors, torch.Tensor]:
        """Compute frames one after another.

        Args:
            state: State before the first frame.
            frames: `FRAME_INPUTS`, each (t, n, ...); without images if `seen` is given.
            seen: Result of `see` for the frames, (t, n, ...).
            stops: (t,) bool, the frames before which gradients stop: truncated backpropagation.

        Returns:
            The state after the last frame, and the outputs (t, n, all heads).
        """
        pictures: Tensors = {}
        if seen is None:
            images, pictures = self.images(state, frames)
            seen = self.see(images)
        given = {n: v for n, v in frames.items() if n in FRAME_INPUTS[2:]}
        if stops is None:
            stops = torch.zeros(len(given["desire"]), dtype=torch.bool)

        def one(carried: Tensors, x: Any) -> tuple[Tensors, torch.Tensor]:
            seen, frame, stop = x
            carried = {name: _stopped(value, stop) for name, value in carried.items()}
            return self.step(carried, seen, frame)

        # The images are already used up, and as scan carries they would be copied for every frame.
        lean = {n: v for n, v in state.items() if n not in ("img", "big_img")}
        last, outputs = scan(one, lean, (seen, given, stops), remat=self.remat)
        kept = {n: state[n] for n in ("img", "big_img") if n in state}
        return {**kept, **last, **pictures}, outputs


def _pushed(queue: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.cat([queue[:, 1:], value.unsqueeze(1)], dim=1)


def _stopped(value: torch.Tensor, stop: torch.Tensor) -> torch.Tensor:
    if not value.dtype.is_floating_point:
        return value
    return torch.where(stop, value.detach(), value)


def _dtype(name: str) -> torch.dtype:
    return torch.float32 if "float" in name else getattr(torch, name)


def load_driver(paths: Sequence[str | Path]) -> Driver:
    """Load model files as a driver.

    Args:
        paths: One supercombo, or vision and policy.

    Raises:
        UsageError: They are not the files of one model.
        CheckpointError: A file is damaged, or cannot be imported.
    """
    models = [load_onnx(path) for path in paths]
    contracts = [read_contract(model) for model in models]
    order = sorted(range(len(paths)), key=lambda i: contracts[i].kind is Kind.POLICY)
    driver = Driver([contracts[i] for i in order], [import_onnx(models[i]) for i in order])
    return driver.eval()
