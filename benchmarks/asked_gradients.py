"""Random scripts that ask for gradients of what a module returns, keeps and makes a leaf.

A module computes tensors from one another, makes some of them leaves, keeps and returns some. A
script asks for their gradients by `retain_grad`, hooks and `torch.autograd.grad`, and for gradients
of these. Each runs in eager PyTorch and under porting(); values, gradients and errors are compared.
Prints what differs: `python -m benchmarks.asked_gradients --count 300`.
"""

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import tpuport
from benchmarks.seeds import Found, run_seeds
from tpuport.foundation.errors import ParityError, PortError

_HEAD = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.linspace(-1, 1, 9).reshape(3, 3))
        self.b = torch.nn.Parameter(torch.linspace(0.5, -0.5, 9).reshape(3, 3))
        self.kept = None

    def forward(self, x):
"""


@dataclass(frozen=True)
class Script:
    """A module's source, and what a script does with each of its calls.

    Attributes:
        source: the module.
        asks: by call, statements over `results`, `net`, `x` and `found`.
        losses: by call, an expression of what is differentiated at its end.
    """

    source: str
    asks: list[list[str]]
    losses: list[str]


class Maker:
    """Makes one script from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names, self._retains = ["x"], False

    def script(self) -> Script:
        """Return a script."""
        lines = ["x.requires_grad_()"] if self._random.random() < 0.2 else []
        for number in range(self._random.randint(2, 6)):
            lines += self._statement(f"t{number}")
        returned = self._some(self._random.randint(1, 4))
        if self._random.random() < 0.5:
            lines.append(f"self.kept = {self._random.choice(self._names)}")
        lines.append(f"return [{', '.join(returned)}]")
        source = _HEAD + "".join(f"        {line}\n" for line in lines)
        calls = range(self._random.randint(1, 3))
        asks = [self._asks(len(returned)) for _ in calls]
        losses = [" + ".join(self._terms(len(returned))) for _ in calls]
        return Script(source, asks, losses)

    def _some(self, count: int) -> list[str]:
        own = self._names[1:]
        return self._random.sample(own, min(count, len(own)))

    def _statement(self, name: str) -> list[str]:
        one, other = (self._random.choice(self._names) for _ in range(2))
        value = self._random.choice(
            [*(f"torch.tanh({one} @ self.a)", f"torch.sin({one}) * {other}", f"{one} @ self.b"),
             *(f"{one}.clone().detach().requires_grad_()", f"({one} + {other}).t()"),
             *(f"{one} * self.a + {other}", f"torch.exp(-({one} ** 2))", f"{one}.clone()"),
             "torch.ones(3, 3, device=x.device, requires_grad=True)", f"{one}[0] + {other}"]
        )  # fmt: skip
        self._names.append(name)
        lines = [f"{name} = {value}"]
        if self._random.random() < 0.1:
            self._retains = True
            lines += [f"if {name}.requires_grad:", f"    {name}.retain_grad()"]
        return lines

    def _result(self, count: int) -> str:
        places = [*(f"results[{i}]" for i in range(count)), *(["net.kept"] * (count > 1)), "x"]
        return self._random.choice(places)

    def _terms(self, count: int) -> list[str]:
        return [f"({self._result(count)} ** 2).sum()" for _ in range(self._random.randint(1, 3))]

    def _asks(self, count: int) -> list[str]:
        found: list[str] = []
        # torch.autograd.grad through one result of a program also reaches the hooks and retained
        # gradients of others: docs/promises.md.
        asks_grad = self._random.random() < 0.5 and not self._retains
        for _ in range(self._random.randint(0, 3)):
            of, more = self._result(count), self._result(count)
            total = " + ".join(self._terms(count))
            scale = self._random.choice(["None", "g * 2", "g + 1"])
            options = "allow_unused=True, retain_graph=True"
            ways = [
                f"{of}.retain_grad()",
                f"{of}.register_hook(lambda g: found.append(g) or {scale})",
                f"found.extend(grad({total}, [{of}, {more}], {options}))",
                f"found.extend(grad({total}, {of}, retain_graph=True))",
                f"extra.append(grad({total}, {of}, create_graph=True)[0].square().sum())",
            ]
            found.append(self._random.choice(ways[2:] if asks_grad else ways[:2]))
        return found


def run(script: Script, device: str, path: Path) -> list[tuple[str, Any]]:
    """Run a script on a device, and return what it sees, in order."""
    path.write_text(script.source)
    names: dict[str, Any] = {"__name__": "script", "__file__": str(path)}
    exec(compile(script.source, path, "exec"), names)
    net, seen = names["Net"]().to(device), []
    for number, (asks, loss) in enumerate(zip(script.asks, script.losses, strict=True)):
        x = (torch.arange(9.0).reshape(3, 3) / 9 - 0.1 * number).to(device)
        extra: list[Any] = []
        results = net(x)
        scope = {"net": net, "x": x, "results": results, "extra": extra}
        scope |= {"torch": torch, "grad": torch.autograd.grad}
        # By statement: in which order hooks of several tensors are called is docs/promises.md.
        lists: list[list[Any]] = [[] for _ in asks]
        for statement, found in zip(asks, lists, strict=True):
            seen += _done(statement, {**scope, "found": found})
        scope["loss"] = loss
        seen += _done(f"(({loss}) + sum(extra)).backward()", scope)
        tensors = [*results, net.kept, x, net.a, net.b]
        gathered = [one for found in lists for one in found]
        seen += [(f"found {i}", _kept(one)) for i, one in enumerate(gathered)]
        for index, one in enumerate(tensors):
            seen.append((f"call {number}, tensor {index}", _kept(one)))
            seen.append((f"call {number}, gradient {index}", _kept(getattr(one, "grad", None))))
            is_tensor = isinstance(one, torch.Tensor)
            seen.append(
                (
                    f"call {number}, leaf {index}",
                    (one.is_leaf, one.requires_grad) if is_tensor else None,
                )
            )
        net.zero_grad()
    return seen


def _done(statement: str, scope: dict[str, Any]) -> list[tuple[str, Any]]:
    try:
        exec(statement, scope)
    except (RuntimeError, AttributeError, TypeError) as error:
        if isinstance(error, PortError):
            raise
        return [(statement, type(error).__name__)]
    return []


def _kept(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else None


def judged(script: Script, folder: Path) -> Found:
    """Run a script twice and compare: "passes", "refused", or "differs"."""
    path = folder / "script.py"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run(script, "cpu", path)
        try:
            with tpuport.porting():
                got = run(script, "cuda", path)
        except ParityError as error:
            return _found("differs", str(error), script)
        except PortError as error:
            return _found("refused", str(error).partition("\n")[0], script)
    for (name, want), (same, have) in zip(expected, got, strict=False):
        if name != same or type(want) is not type(have):
            return _found("differs", f"{name}: {want!r}; port: {same}: {have!r}", script)
        if isinstance(want, torch.Tensor) and isinstance(have, torch.Tensor):
            if not torch.allclose(want, have, rtol=1e-3, atol=1e-4, equal_nan=True):
                return _found("differs", f"{name}: {want.tolist()}; {have.tolist()}", script)
        elif want != have:
            return _found("differs", f"{name}: {want}; port: {have}", script)
    return _found("passes" if len(expected) == len(got) else "differs", "", script)


def _found(kind: str, what: str, script: Script) -> Found:
    shown = [script.source[len(_HEAD) :], *map(str, script.asks), *script.losses]
    return Found(kind, what, "\n".join(shown))


def _judged(seed: int, folder: Path) -> Iterator[Found]:
    yield judged(Maker(seed).script(), folder)


if __name__ == "__main__":
    run_seeds(__doc__, _judged)
