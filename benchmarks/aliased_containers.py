"""Random modules whose lists, dicts and objects have several names, in branches and loops.

Branches and loops on traced values give one container or another, rounds and submodules write to
what they are given, and what one name writes has to reach the others. Values and gradients are
compared with eager PyTorch on all paths, by convert() and porting(). Prints what differs:
`python -m benchmarks.aliased_containers --count 300`.
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

_NAMES = ("p", "q", "r")
_HEAD = """
import torch
from torch import nn


class Box:
    def __init__(self, k, l):
        self.k, self.l = k, l


class Inner(nn.Module):
    def forward(self, s, c):
{inner}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.held = Inner(), None
        self.weight = nn.Parameter(torch.tensor([0.5, -1.5, 1.0]))

    def forward(self, x, m, n):
        x = x * self.weight
{body}
"""
_INNER = (
    'if c:\n    s = {"k": s["k"] * 2, "l": s["l"]}\ns["k"] = s["k"] + 1\nreturn s',
    'if c:\n    return s\nreturn {"k": s["k"], "l": s["l"]}',
    's["l"][0] = s["l"][0] * 0.5\nreturn s if c else dict(s)',
    's["k"] = s["k"] * 0.5\nreturn s',
)
_ENDS = 'return [d["k"] * 1 for d in (p, q, r, t)], [d["l"][0] * 1 for d in (p, q, r, t)]'


class Maker:
    """Makes one module from a seed; with `objects`, containers are objects with attributes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._objects = self._random.random() < 0.25

    def program(self) -> str:
        """Return the source of a module."""
        chosen = self._random
        lines = ['p = {"k": x, "l": [x * 2]}']
        q = ["p", '{"k": x * 3, "l": [x]}', '{"k": x * 3, "l": p["l"]}']
        lines.append(f"q = {chosen.choice(q)}")
        r = ["q", '{"k": x - 1, "l": [x * 4]}', "self.held = p"]
        lines.append(f"r = {chosen.choice(r)}")
        for _ in range(chosen.randint(2, 5)):
            lines += self._statement(chosen.random())
        lines += ["t = p if self.held is None else self.held", "self.held = None", _ENDS]
        inner = chosen.choice(_INNER)
        source = _HEAD.format(
            inner=textwrap.indent(inner, " " * 8),
            body=textwrap.indent("\n".join(lines), " " * 8),
        )
        return _as_objects(source) if self._objects else source

    def _name(self) -> str:
        return self._random.choice(_NAMES)

    def _fresh(self) -> str:
        one, other = self._name(), self._name()
        number = self._random.randint(2, 5)
        return self._random.choice(
            [
                f'{{"k": x * {number}, "l": [x + {number}]}}',
                f'{{"k": {one}["k"] + 1, "l": {other}["l"]}}',
                f"dict({one})",
            ]
        )

    def _change(self) -> str:
        """Return a statement that writes to a container or gives a name another one."""
        one, other, third = self._name(), self._name(), self._name()
        return self._random.choice(
            [
                f'{one}["k"] = {other}["k"] * 0.5 + 1',
                f'{one}["l"][0] = {other}["l"][0] * 0.5 + {third}["k"]',
                f'{one}["l"] = [{other}["k"]]',
                f'{one}["k"] += 1',
                f"{one} = self.inner({other}, m[{self._random.randint(0, 2)}])",
                f"{one} = {other}",
                f"{one}, {other} = {other}, {one}",
                f"{one} = {self._fresh()}",
            ]
        )

    def _statement(self, kind: float) -> list[str]:
        test = f"m[{self._random.randint(0, 2)}]"
        if kind < 0.15:
            other = self._random.choice([self._fresh(), self._name()])
            return [f"{self._name()} = {self._name()} if {test} else {other}"]
        if kind < 0.45:
            sides = [self._block(1, 2), self._block(1, 1)]
            if self._random.random() < 0.5:
                return [f"if {test}:", *sides[0]]
            return [f"if {test}:", *sides[0], "else:", *sides[1]]
        if kind < 0.7:
            return self._loop()
        return [self._change()]

    def _block(self, least: int, most: int) -> list[str]:
        return [f"    {self._change()}" for _ in range(self._random.randint(least, most))]

    def _loop(self) -> list[str]:
        rounds = self._random.choice([2, 3, 5, 34])
        body = self._block(1, 2)
        kind = self._random.random()
        if kind < 0.4:
            return ["i = torch.zeros(())", "while i < n:", *body, "    i = i + 1"]
        if kind < 0.6:
            return [f"for i in range({rounds}):", *body, "    if i >= n:", "        break"]
        return [f"for i in range({rounds}):", *body]


def _as_objects(source: str) -> str:
    for kind in ("k", "l"):
        source = source.replace(f'["{kind}"]', f".{kind}")
    source = source.replace('{"k": ', "Box(").replace(', "l": ', ", ").replace("}", ")")
    for name in ("s", *_NAMES):
        source = source.replace(f"dict({name})", f"Box({name}.k, {name}.l)")
    return source


def _ran(net: Any, call: Any, device: str) -> Iterator[Any]:
    """Yield the values and, by `backward`, the gradients of calls on all paths."""
    for bits in range(8):
        x = torch.linspace(-1, 2, 3) + 0.1 * bits
        mask = torch.tensor([bool(bits & 1), bool(bits & 2), bool(bits & 4)])
        found = call(*(one.to(device) for one in (x, mask, torch.tensor(float(bits % 4)))))
        whole = torch.stack([*found[0], *found[1]])
        if isinstance(net, torch.nn.Module):
            (gradient,) = torch.autograd.grad(whole.square().mean(), list(net.parameters()))
            yield whole.detach().cpu(), gradient.detach().cpu()
        else:
            yield tpuport.to_torch(whole), None


def verdict(source: str, path: Path, how: str) -> tuple[str, str]:
    """Run a module in eager PyTorch and ported: "passes", "refused" or "differs"."""
    path.write_text(source)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(source, path, "exec"), names)
    eager = names["Net"]()
    wanted = list(_ran(eager, eager, "cpu"))
    try:
        if how == "convert":
            ported = tpuport.convert(names["Net"](), verify=False)
            got = list(_ran(ported, ported, "cpu"))
        else:
            with tpuport.porting():
                net = names["Net"]().to("cuda")
                got = list(_ran(net, net, "cuda"))
    except PortError as error:
        return "refused", str(error).partition("\n")[0]
    except Exception as error:
        return "differs", f"raises {type(error).__name__}: {error}"
    for bits, (want, have) in enumerate(zip(wanted, got, strict=True)):
        for what, ours, theirs in zip(("values", "gradients"), have, want, strict=True):
            if ours is not None and not torch.allclose(ours, theirs, 1e-4, 1e-5, True):
                return "differs", f"{what} of call {bits}: {theirs.tolist()}; port: {ours.tolist()}"
    return "passes", ""


def _judged(seed: int, folder: Path) -> Iterator[Found]:
    source = Maker(seed).program()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for how in ("convert", "porting"):
            yield Found(*verdict(source, folder / f"script{seed}.py", how), source, how)


if __name__ == "__main__":
    run_seeds(__doc__, _judged)
