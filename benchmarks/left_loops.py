"""Random loops that traced values end: by `break`, `return`, a test or the last item.

Rounds bind names, swap them, write to tensors in place and branch; code after the loop reads what
is left, and writes to it. Values are compared with eager PyTorch on five inputs by convert(), and
gradients by porting(). Prints what differs: `python -m benchmarks.left_loops --count 300`.
"""

import random
import textwrap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import tpuport
from benchmarks.seeds import Found, run_seeds
from tpuport.foundation.errors import PortError

_HEAD = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(3, 3)

    def forward(self, x):
{body}
"""
# The scale of the numbers and their mean: loops end at the first round, later, or never.
_INPUTS = ((1.0, 0.0), (0.3, 0.5), (1.0, -1.0), (2.0, 0.0), (0.01, 0.0))
_ROUNDS = (5, 14, 20)


class Maker:
    """Makes one module from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names = ["a", "b"]

    def program(self) -> str:
        """Return the source of a module."""
        chosen = self._random
        begun = chosen.choice(["a = x * 1\nb = a * 0.5", "a = b = x * 1"])
        lines = [*begun.split("\n"), "k, f = 0, 1.0", *self._loop()]
        if chosen.random() < 0.25:
            lines += ["else:", "    b = b * 2"]
        if chosen.random() < 0.35:
            lines.append(f"{self._name()}.add_(1.0)")
        lines.append(f"return {self._name()}, {self._name()}, k, f")
        return _HEAD.format(body=textwrap.indent("\n".join(lines), " " * 8))

    def _name(self) -> str:
        return self._random.choice(self._names)

    def _loop(self) -> list[str]:
        chosen = self._random
        rounds, kind = chosen.choice(_ROUNDS), chosen.choice(["range", "while", "endless", "rows"])
        exits = ["break", "return"] if kind == "endless" else ["break", "return", "continue"]
        head = {
            "range": [f"for k in range({rounds}):"],
            "while": [f"while {self._test()} and k < {rounds}:", "    k += 1"],
            "endless": ["while True:", "    k += 1"],
            "rows": ["for k, row in enumerate(x):", "    a = a + row * 0.1"],
        }[kind]
        body = [line for _ in range(chosen.randint(2, 4)) for line in self._statement(exits)]
        if kind == "endless":
            body += [f"if {self._test()}:", "    break", f"if k >= {rounds}:", "    break"]
        elif kind != "while":
            body += [f"if {self._test()}:", "    break"] if chosen.random() < 0.7 else []
        return [*head, *(f"    {line}" for line in body)]

    def _statement(self, exits: list[str]) -> list[str]:
        chosen = self._random
        kind, one, other = chosen.random(), self._name(), self._name()
        if kind < 0.5:
            value, name = self._value(), chosen.choice("abzw")
            if name not in self._names:
                self._names.append(name)
            return [f"{name} = {value}"]
        if kind < 0.58:
            return ["f = f * 1.1 + 0.01 * k"]
        if kind < 0.66 and one != other:
            return [f"{one}, {other} = {other}, {one} * 0.8"]
        if kind < 0.72:
            return [f"{one}.{chosen.choice(['mul_(0.9)', 'add_(0.05)'])}"]
        if kind < 0.82:
            return [f"if {self._test()}:", f"    {one} = {self._value()}"]
        exit_ = chosen.choice(exits)
        exit_ += f" {one}, {other}, k, f" if exit_ == "return" else ""
        return [f"if {self._test()}:", f"    {exit_}"]

    def _value(self) -> str:
        one, other = self._name(), self._name()
        values = [
            f"torch.tanh(self.layer({one}) * 0.7 + 0.1)",
            f"{one} * 0.9",
            f"{one} + {other} * 0.3",
            f"torch.sin({one}) + 0.05 * k",
            f"{one}.clone()",
            one,
            f"{one} - {other}.mean()",
            f"torch.where({one} > 0, {one}, {other})",
        ]
        return self._random.choice(values)

    def _test(self) -> str:
        chosen, one, other = self._random, self._name(), self._name()
        tests = [
            f"{one}.sum() > {chosen.choice([-1, 0, 1, 2])} + 0.013",
            f"({one} - {other}).abs().max() < {chosen.choice([0.05, 0.3])}",
            f"{one}.abs().max() < {chosen.choice([0.3, 0.8])}",
            f"{one}.norm() > {chosen.choice([1, 2])}",
        ]
        return chosen.choice(tests)


def _inputs() -> Iterator[torch.Tensor]:
    for seed, (scale, shift) in enumerate(_INPUTS, 1):
        generator = torch.Generator().manual_seed(seed)
        yield torch.randn(4, 3, generator=generator) * scale + shift


def _called(net: Callable[..., Any], x: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the values of a call; one of an `UnboundLocalError`, which eager PyTorch raises."""
    try:
        out = net(x.clone())
    except UnboundLocalError:
        return []
    plain = [tpuport.to_torch(v) if hasattr(v, "dtype") else torch.tensor(v) for v in out]
    return [one.detach().to(dtype) for one in plain]


def _gradients(make: Callable[[], Any], device: str) -> list[torch.Tensor] | None:
    """Return the gradients of a first call; None where PyTorch has none after writes in place."""
    net, x = make().to(device), next(_inputs()).to(device).requires_grad_()
    try:
        one, other, *_ = net(x)
        (one.square().sum() + 2 * other.square().sum()).backward()
    except (RuntimeError, UnboundLocalError) as error:
        if isinstance(error, PortError):
            raise
        return None
    found = (x.grad, net.layer.weight.grad)
    return [torch.zeros(()) if g is None else g.detach().cpu() for g in found]


def _differ(ours: list[torch.Tensor], theirs: list[torch.Tensor], tolerance: float) -> bool:
    if len(ours) != len(theirs):
        return True
    pairs = zip(ours, theirs, strict=True)
    return not all(
        a.shape == b.shape and torch.allclose(a, b, tolerance, tolerance) for a, b in pairs
    )


def verdict(source: str, path: Path) -> tuple[str, str]:
    """Run a module in eager PyTorch and ported: "passes", "refused", "chaotic" or "differs"."""
    path.write_text(source)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(source, path, "exec"), names)
    make, dtype = names["Net"], torch.float64
    try:
        ported = tpuport.convert(make(), verify=False)
        for number, x in enumerate(_inputs()):
            ours, theirs = _called(ported, x, dtype), _called(make(), x, dtype)
            if _differ(ours, theirs, 2e-4):
                exact = _called(make().double(), x.double(), dtype)
                kind = "chaotic" if _differ(theirs, exact, 1e-6) else "differs"
                return kind, f"call {number}: {theirs}; port: {ours}"
        wanted = _gradients(make, "cpu")
        with tpuport.porting():
            got = _gradients(make, "cuda")
    except PortError as error:
        return "refused", str(error).partition("\n")[0]
    except Exception as error:
        return "differs", f"raises {type(error).__name__}: {error}"
    if wanted is not None and (got is None or _differ(got, wanted, 1e-3)):
        return "differs", f"gradients {wanted}; port: {got}"
    return "passes", ""


def _judged(seed: int, folder: Path) -> Iterator[Found]:
    source = Maker(seed).program()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Found(*verdict(source, folder / f"script{seed}.py"), source)


if __name__ == "__main__":
    run_seeds(__doc__, _judged)
