"""The original run in eager PyTorch: results, gradients and values in between, also in float64."""

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tpuport.foundation.user_frames import CodePlace, is_inside
from tpuport.model.parity.float64 import Float64
from tpuport.tracing.core.precision_seen import draws
from tpuport.tracing.session.activate import no_fused_kernels

_DROPOUTS = (torch.nn.functional.dropout, torch.dropout)


@dataclass(frozen=True)
class Step:
    """One value in between.

    Attributes:
        op: The ATen op.
        module: The innermost module that ran.
        place: The user's innermost line; None where there is none.
        parents: The values that it was computed from, by their numbers.
        is_constant: Whether it depends on neither inputs nor weights.
    """

    op: str
    module: str
    place: CodePlace | None
    parents: tuple[int, ...]
    is_constant: bool


@dataclass
class OriginalRun:
    """What one run of the original gave; arrays are in float64 if it ran so.

    Attributes:
        out: The tensors of the output, in order.
        loss: The loss.
        gradients: By parameter; None for one that the loss does not depend on.
        steps: The values in between, in the order of execution.
        values: Their arrays.
        ends: The number of each output, then of the loss, among them.
        masks: How many masks of dropout were taken.
        drawn: Other random ops that ran.
        changed: Buffers that forward changed.
    """

    out: list[np.ndarray] = field(default_factory=list)
    loss: np.ndarray = field(default_factory=lambda: np.zeros(()))
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    values: list[np.ndarray] = field(default_factory=list)
    ends: list[int | None] = field(default_factory=list)
    masks: int = 0
    drawn: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Original:
    """The original and how to call it.

    Attributes:
        model: The module; every run takes a copy.
        args: The arguments.
        kwargs: The keyword arguments.
        loss: The loss of an output and the arguments.
    """

    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[..., torch.Tensor]

    def run(self, masks: Sequence[np.ndarray], *, wide: bool, record: bool) -> OriginalRun:
        """Run forward, loss and backward once.

        Args:
            masks: What dropout keeps, in the order of the calls; without any it is torch's own.
            wide: Whether to compute in float64.
            record: Whether to keep the values in between.
        """
        model, args, kwargs = copy.deepcopy((self.model, self.args, self.kwargs))
        float64 = Float64() if wide else None
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        found = OriginalRun()
        fixed = FixedDropout(masks)
        recorder = _Recorder(model, (args, kwargs), found, float64)
        with settled(float64), fixed, torch.enable_grad():
            with recorder if record else contextlib.nullcontext():
                out = model(*args, **kwargs)
                loss = self.loss(out, *args, **kwargs)
            outs = [leaf for _, leaf in named_leaves(out) if isinstance(leaf, torch.Tensor)]
            trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
            made = _gradients(loss, trained)
            found.gradients = {
                name: None if grad is None else value_of(grad, float64)
                for name, grad in made.items()
            }
            found.out = [value_of(one, float64).numpy() for one in outs]
            found.loss = value_of(loss, float64).numpy()
        if record:
            found.ends = [recorder.number_of(one) for one in (*outs, loss)]
        found.masks = fixed.taken
        found.changed = [n for n, b in model.named_buffers() if not torch.equal(b, before[n])]
        return found


def _gradients(
    loss: torch.Tensor, trained: dict[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor | None]:
    if not trained or not loss.requires_grad:
        return dict.fromkeys(trained)
    made = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return dict(zip(trained, made, strict=True))


def named_leaves(value: Any, path: str = "output") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested containers with their paths; those of a mapping by key."""
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from named_leaves(value[key], f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, one in enumerate(value):
            yield from named_leaves(one, f"{path}[{index}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for part in dataclasses.fields(value):
            yield from named_leaves(getattr(value, part.name), f"{path}.{part.name}")
    elif value is not None:
        yield path, value


@contextlib.contextmanager
def settled(float64: Float64 | None) -> Iterator[None]:
    """Run torch without fused kernels, whose values in between nobody sees, and in float64."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    kernel = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
    try:
        # Every run draws the same numbers: what two of them differ by is rounding.
        with no_fused_kernels(), kernel, torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            with float64 or contextlib.nullcontext():
                yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def value_of(tensor: torch.Tensor, float64: Float64 | None) -> torch.Tensor:
    """Return a copy of a tensor's value, in float64 if it ran so."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        value = tensor.detach().clone() if float64 is None else float64.value(tensor).detach()
        return value.double() if value.dtype in (torch.bfloat16, torch.float16) else value


class FixedDropout(TorchFunctionMode):
    """Gives calls of dropout the masks that the port drew."""

    def __init__(self, masks: Sequence[np.ndarray]) -> None:
        super().__init__()
        self.masks, self.taken = list(masks), 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _DROPOUTS:
            return func(*args, **kwargs)
        given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
        p = given.get("p", 0.5)
        training = given.get("training", given.get("train", True))
        if not training or p == 0:
            return func(*args, **kwargs)
        self.taken += 1
        if self.taken > len(self.masks):
            return func(*args, **kwargs)
        mask = torch.from_numpy(self.masks[self.taken - 1] != 0)
        x = given["input"]
        if mask.shape != x.shape and mask.numel() == x.numel():
            mask = mask.reshape(x.shape)
        return x * mask.to(x.dtype) / (1 - p)


class _Recorder(TorchDispatchMode):
    """Keeps what every op gives, with the line and module that called it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(
        self, model: torch.nn.Module, given: Any, into: OriginalRun, float64: Float64 | None
    ) -> None:
        super().__init__()
        self.into, self.float64 = into, float64
        self.modules: list[str] = []
        self.kept: list[torch.Tensor] = []  # so that no address is used again
        self.numbers: dict[int, int] = {}
        self.writers: dict[int, int] = {}
        roots = [*model.parameters(), *model.buffers(), *tree_leaves(given)]
        self.roots = {_storage(one) for one in roots if isinstance(one, torch.Tensor)}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._entered(name))
            module.register_forward_hook(self._left, always_call=True)

    def _entered(self, name: str) -> Callable[..., None]:
        return lambda *_: self.modules.append(name)

    def _left(self, *_: Any) -> None:
        self.modules.pop()

    def number_of(self, tensor: torch.Tensor) -> int | None:
        """Return the number of the value that a tensor is; None if nothing computed it."""
        return self.numbers.get(id(tensor), self.writers.get(_storage(tensor)))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        made = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        parents = tuple(sorted({n for one in given if (n := self.number_of(one)) is not None}))
        if func.is_view:
            for one in made:
                self._view(one, given[0], parents)
            return out
        if draws(func):
            self.into.drawn.append(str(func))
        constant = not any(_storage(one) in self.roots for one in given) and all(
            self.into.steps[n].is_constant for n in parents
        )
        for one in made:
            step = Step(
                str(func), self.modules[-1] if self.modules else "", _line(), parents, constant
            )
            self._keep(one, step)
        return out

    def _keep(self, tensor: torch.Tensor, step: Step) -> None:
        self.numbers[id(tensor)] = self.writers[_storage(tensor)] = len(self.into.steps)
        self.into.steps.append(step)
        self.into.values.append(value_of(tensor, self.float64).numpy())
        self.kept.append(tensor)

    def _view(self, view: torch.Tensor, base: torch.Tensor, parents: tuple[int, ...]) -> None:
        self.kept.append(view)
        number = self.number_of(base)
        if number is None:
            return
        self.numbers[id(view)] = number
        if view.numel() != base.numel():  # a part of it, or an expansion
            step = self.into.steps[number]
            part = Step(
                "view", self.modules[-1] if self.modules else "", _line(), parents, step.is_constant
            )
            writer = self.writers.get(_storage(view))
            self._keep(view, part)
            if writer is not None:
                self.writers[_storage(view)] = writer


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _line() -> CodePlace | None:
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_inside(file):
            return CodePlace.at(file, frame.f_lineno)
        frame = frame.f_back
    return None
