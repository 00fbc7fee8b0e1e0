"""Random modules that switch gradients on and off in a call, and scripts that train them.

Calls run parts under `no_grad` and `enable_grad`, freeze layers and parameters for a while, detach,
differentiate, hook and write to buffers; scripts freeze and switch modes between calls. Values,
gradients, flags and state of three steps are compared with eager PyTorch by porting().
Prints what differs: `python -m benchmarks.switched_gradients --count 300`.
"""

import random
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tpuport
from benchmarks.seeds import Found, run_seeds
from tpuport.foundation.errors import PortError

_HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight * 2

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        for_weight = (gradient * x).sum(0) if ctx.needs_input_grad[1] else None
        return gradient * weight * 3, for_weight


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.other, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.linspace(-1, 1, 3))
        self.register_buffer("mean", torch.zeros(3))

    def part(self, x, y):
        return torch.tanh(self.layer(x)) * self.scale + y

    def forward(self, x):
{body}
"""
_MODES = ("no_grad()", "enable_grad()", "set_grad_enabled(self.training)", "no_grad()")
_BETWEEN = (
    *("", "", "net.eval()", "net.train()", "net.layer.requires_grad_(False)"),
    *("net.layer.requires_grad_(True)", "net.scale.requires_grad_(False)"),
)
_Seen = list[tuple[str, Any]]


class Maker:
    """Makes one module from a seed, and what a script does before each call."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names = ["x"]

    def program(self) -> str:
        """Return the source of a module."""
        lines = [line for _ in range(self._random.randint(3, 8)) for line in self._statement(0)]
        lines.append(f"return {self._names[-1]}, {self._name()}")
        return _HEAD.format(body=textwrap.indent("\n".join(lines), " " * 8))

    def script(self) -> list[tuple[str, bool]]:
        """Return a statement before each call, and whether its input requires grad."""
        chosen = self._random
        return [(chosen.choice(_BETWEEN), chosen.random() < 0.5) for _ in range(3)]

    def _name(self) -> str:
        return self._random.choice(self._names[-5:])

    def _new(self) -> str:
        self._names.append(f"t{len(self._names)}")
        return self._names[-1]

    def _value(self) -> str:
        one, other = self._name(), self._name()
        values = [
            *(f"self.layer({one})", f"self.other({one})", f"self.norm({one})"),
            *(f"torch.tanh({one}) * self.scale", f"{one} + {other}", f"{one} * {other}"),
            *(f"Scaled.apply({one}, self.scale)", f"Rounded.apply({one}) + {other}"),
            f"checkpoint(self.part, {one}, {other}, use_reentrant=False)",
            f"F.linear({one}, self.layer.weight.detach(), self.other.bias)",
            *(f"{one}.detach() + {other}", f"{one}.data * {other}", f"self.part({one}, {other})"),
            *(f"{one} - {one}.detach() + {other}.detach()", f"{one} + self.mean"),
            f"torch.where({one} > 0, {one}, {other})",
        ]
        return self._random.choice(values)

    def _assigned(self) -> str:
        value = self._value()
        return f"{self._new()} = {value}"

    def _statement(self, depth: int) -> list[str]:
        chosen, kind = self._random, self._random.random()
        if kind < 0.45:
            return [self._assigned()]
        if kind < 0.62 and depth < 2:
            count = chosen.randint(1, 3)
            body = [line for _ in range(count) for line in self._statement(depth + 1)]
            return [f"with torch.{chosen.choice(_MODES)}:", *(f"    {line}" for line in body)]
        if kind < 0.75:
            part = chosen.choice(["layer", "other", "norm", "scale", "layer.weight"])
            flag = f"self.{part}.requires_grad_"
            return [f"{flag}(False)", self._assigned(), f"{flag}(True)"]
        return self._rarer()

    def _rarer(self) -> list[str]:
        chosen, one, other = self._random, self._name(), self._name()
        kind = chosen.choice(["buffer", "inner", "hook", "reads", "reads"])
        if kind == "buffer":
            return ["with torch.no_grad():", f"    self.mean.mul_(0.9).add_({one}.mean(0) * 0.1)"]
        if kind == "hook":
            factor = chosen.choice([0.5, 2.0])
            return [
                f"if {one}.requires_grad and {one} is not x:",
                f"    {one}.register_hook(lambda gradient: gradient * {factor})",
            ]
        new = self._new()
        if kind == "reads":
            test = chosen.choice([f"{one}.requires_grad", "torch.is_grad_enabled()"])
            return [f"{new} = {other} if {test} else {other} * 2"]
        graph = chosen.choice([True, False])
        return [
            f"{new} = {one}.detach().clone().requires_grad_()",
            "with torch.enable_grad():",
            f"    loss = self.layer({new}).square().sum()",
            f"    {new} = {new} - torch.autograd.grad(loss, {new}, create_graph={graph})[0] * 0.1",
        ]


def trained(
    source: str, script: list[tuple[str, bool]], where: str | torch.dtype, path: Path
) -> _Seen:
    """Run a script on a device, or in a dtype, and return what it sees, in order."""
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(source, path, "exec"), names)
    net, seen = names["Net"]().to(where), _Seen()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for number, (statement, is_leaf) in enumerate(script):
        exec(statement, {"net": net})
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, 3, generator=generator).to(where).requires_grad_(is_leaf)
        optimizer.zero_grad()
        one, other = net(x)
        flags = one.requires_grad, other.requires_grad
        seen += [("first", one), ("second", other), ("flags", flags)]
        if any(flags):
            (one.square().sum() + 2 * other.sum()).backward()
            seen += [(f"gradient of {n}", p.grad) for n, p in net.named_parameters()]
            seen.append(("gradient of x", x.grad))
            optimizer.step()
        seen += [(name, value.clone()) for name, value in net.state_dict().items()]
        seen += [(f"flag of {n}", p.requires_grad) for n, p in net.named_parameters()]
    is_tensor = torch.is_tensor
    return [(n, v.detach().cpu().double().clone() if is_tensor(v) else v) for n, v in seen]


def _differ(want: Any, have: Any, tolerance: float = 1e-4) -> bool:
    if not (isinstance(want, torch.Tensor) and isinstance(have, torch.Tensor)):
        return want is not have and want != have
    return want.shape != have.shape or not torch.allclose(want, have, 10 * tolerance, tolerance)


def verdict(source: str, script: list[tuple[str, bool]], path: Path) -> tuple[str, str]:
    """Run a script in eager PyTorch and ported."""
    path.write_text(source)
    try:
        wanted = trained(source, script, "cpu", path)
    except RuntimeError as error:  # such as a checkpoint that computes something else again
        return "eager raises", str(error)
    try:
        with tpuport.porting():
            found = trained(source, script, "cuda", path)
    except PortError as error:
        return "refused", str(error).partition("\n")[0]
    except Exception as error:
        return "differs", f"raises {type(error).__name__}: {error}"
    pairs = zip(wanted, found, strict=True)
    for place, ((name, want), (_, have)) in enumerate(pairs):
        if _differ(want, have):
            exact = trained(source, script, torch.float64, path)
            rough = any(_differ(a, b, 1e-5) for (_, a), (_, b) in zip(wanted, exact, strict=True))
            return "chaotic" if rough else "differs", f"{name} ({place}): {want}; port: {have}"
    return "passes", ""


def _judged(seed: int, folder: Path) -> Iterator[Found]:
    maker = Maker(seed)
    source, script = maker.program(), maker.script()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Found(*verdict(source, script, folder / f"script{seed}.py"), f"{source}\n{script}")


if __name__ == "__main__":
    run_seeds(__doc__, _judged)
