"""Random modules out of idioms of Python, each run in eager PyTorch, by convert() and porting().

Closures, decorators, generators, properties, data classes, context managers, exceptions, caches,
mutable defaults, class attributes, dynamic attributes and their like, as research code has them.
Between the calls a script changes what the code reads. Values, gradients, what the code left in
Python objects, and what is raised are compared after each call. Prints what differs:
`python -m benchmarks.python_idioms --count 300`.
"""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import tpuport
from benchmarks.seeds import Found, run_seeds
from benchmarks.training_scripts import listed
from tpuport.foundation.errors import ParityError, PortError

HEAD = '''
import abc
import collections
import contextlib
import dataclasses
import enum
import functools
import itertools
import math
import operator
import types
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Mode(enum.Enum):
    SMALL = 1
    LARGE = 2


@dataclasses.dataclass
class Config:
    slope: float = 0.1
    depth: int = 2
    names: list = dataclasses.field(default_factory=lambda: ["tanh", "relu"])
    mode: Mode = Mode.SMALL

    @property
    def gain(self):
        return self.slope * 10


class Pair(NamedTuple):
    first: torch.Tensor
    second: float


@dataclasses.dataclass
class State:
    value: torch.Tensor
    count: int = 0

    def updated(self, x):
        return State(self.value + x, self.count + 1)

    def __add__(self, other):
        return State(self.value + other.value, self.count + other.count)


REGISTRY = {}
GLOBAL = {"scale": 1.0, "cache": {}, "calls": 0}
LOG = []
FACTOR = 2.0
TABLE = torch.linspace(0, 1, 4)


def register(name):
    def add(function):
        REGISTRY[name] = function
        return function

    return add


@register("tanh")
def of_tanh(x):
    return torch.tanh(x)


@register("relu")
def of_relu(x):
    return torch.relu(x) + 0.1 * x


def counted(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        call.count += 1
        return function(*args, **kwargs)

    call.count = 0
    return call


@counted
def scaled(x, by=1.5):
    return x * by


def remembered(x, seen=[]):
    seen.append(len(seen))
    return x + 0.01 * len(seen)


@functools.lru_cache(maxsize=None)
def positions(size):
    return torch.arange(size, dtype=torch.float32) / size


@contextlib.contextmanager
def doubled(settings):
    old = settings["scale"]
    settings["scale"] = old * 2
    try:
        yield settings["scale"]
    finally:
        settings["scale"] = old


def pieces(x, count):
    for index in range(count):
        yield index, x * (index + 1)


def accumulate(values):
    total = 0
    while True:
        try:
            total = total + next(values)
        except StopIteration:
            return total


class Checks(Exception):
    def __init__(self, value):
        super().__init__("checked")
        self.value = value


def checked(x, limit):
    if x.shape[0] > limit:
        raise Checks(x * 0.5)
    return x * 2


class Base(nn.Module, abc.ABC):
    scale = 1.25

    @abc.abstractmethod
    def inner(self, x): ...

    def forward(self, x):
        return self.inner(x) * self.scale


class Derived(Base):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.9))

    def inner(self, x):
        return x * self.weight

    def forward(self, x):
        return super().forward(x) + 0.1


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class Lazy:
    """A descriptor that makes its value at the first use."""

    def __init__(self, make):
        self.make = make

    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, owner, cls=None):
        if owner is None:
            return self
        if not hasattr(owner, self.name):
            setattr(owner, self.name, self.make(owner))
        return getattr(owner, self.name)


class Net(nn.Module):
    shared = []
    factor = 0.75
    lazy = Lazy(lambda self: torch.full((4,), 0.5))

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.derived, self.wrapped = Derived(), Wrapper(Derived())
        self.layers = nn.ModuleDict({"b": nn.Linear(4, 4), "a": nn.Tanh()})
        self.activation = lambda x: torch.tanh(x) * self.config.slope
        self.partial = functools.partial(F.leaky_relu, negative_slope=0.2)
        self.options = types.SimpleNamespace(power=2, flags={"skip": True, "noise": None})
        self.history = collections.deque(maxlen=3)
        self.counts = collections.Counter()
        self.table = collections.OrderedDict(x=0.5, y=2)
        self.bound = self.helper
        self.state = State(torch.zeros(4))
        self.schedule = np.linspace(0.1, 0.9, 5)
        self.steps = 0
        self.names = {"tanh", "relu"}

    @property
    def depth(self):
        return self.config.depth + 1

    @depth.setter
    def depth(self, value):
        self.config.depth = value - 1

    @staticmethod
    def fixed(x):
        return x * FACTOR

    @classmethod
    def of_class(cls, x):
        return x * cls.factor

    def helper(self, x, *more, sign=1, **options):
        return sign * x + sum(more) + options.get("bias", 0.0)

    @functools.cached_property
    def kept(self):
        return self.config.slope * 3

    def __len__(self):
        return 3

    def recursive(self, x, depth):
        return x if depth == 0 else self.recursive(torch.tanh(self.first(x)), depth - 1)

    def forward(self, x):
'''

_IDIOMS = listed("""
x = self.activation(x)

x = self.partial(x)

x = REGISTRY[self.config.names[self.steps % 2]](x)

x = scaled(x, by=FACTOR)

x = x * scaled.count

x = remembered(x)

x = x + positions(x.shape[-1])

with doubled(GLOBAL) as factor:
    x = x * factor + GLOBAL["scale"]

for index, piece in pieces(x, self.depth):
    x = x + piece * 0.1 * index

x = accumulate(iter([x, x * 0.5, TABLE]))

try:
    x = checked(x, 3)
except Checks as error:
    x = error.value + 1

try:
    x = x + self.missing
except AttributeError:
    x = x * 0.9

x = self.derived(x)

x = self.wrapped(x) * self.wrapped.weight

x = x + self.lazy

x = self.bound(x, 0.1, TABLE, sign=-1, bias=0.2)

for name, layer in sorted(self.layers.items()):
    x = layer(x) + len(name)

for name, layer in self.layers.items():
    x = layer(x) * (1 if name > "a" else 2)

x = x ** self.options.power if self.options.flags["skip"] else x

x = x if self.options.flags.get("noise") is None else x + self.options.flags["noise"]

self.history.append(x.detach().mean())
x = x + sum(self.history) / len(self.history)

self.history.appendleft(float(self.steps))
x = x * (1 + len(self.history))

self.counts["calls"] += 1
x = x * self.counts["calls"]

self.counts.update(["a", "b"])
x = x + max(self.counts.values())

self.table.move_to_end("x")
x = x * list(self.table.values())[0]

self.table["z"] = self.table.get("z", 0) + 1
x = x + len(self.table) + self.table["z"]

self.state = self.state.updated(x.detach().sum(0) * 0.1)
x = x + self.state.value * self.state.count

self.state = self.state + State(torch.ones_like(self.state.value), 1)
x = x * self.state.value.mean()

self.steps += 1
x = x * self.schedule[min(self.steps, 4)]

self.steps += 1
x = x * (self.steps if self.steps % 2 else -1)

x = x * self.kept

x = self.fixed(x) + self.of_class(x)

x = self.recursive(x, self.config.depth)

pair = Pair(x, second=0.5)
x = pair.first * pair.second + pair._replace(second=2.0).second

first, *rest, last = x.unbind(0)
x = torch.stack([last, *rest, first])

x = torch.stack([row * i for i, row in enumerate(x, start=1)])

x = torch.cat([part for part in x.split(2) if part.shape[0] == 2] or [x])

x = functools.reduce(operator.add, [x * w for w in (0.1, 0.2, 0.3)])

x = sum(itertools.starmap(lambda a, b: a * b, zip([x, x * 2], [0.5, 0.25])))

x = {Mode.SMALL: torch.tanh, Mode.LARGE: torch.sigmoid}[self.config.mode](x)

match self.config.mode:
    case Mode.SMALL:
        x = x * 1.1
    case _:
        x = x * 0.2

if (size := x.shape[0]) > 2:
    x = x / size

x = x * math.sqrt(self.config.slope) + math.prod(x.shape)

x = x * (1 if isinstance(self.second, nn.Linear) else 3)

x = getattr(self, "second")(x)

x = getattr(F, "gelu" if self.training else "silu")(x)

setattr(self, f"value_{self.steps}", x.detach())
x = x + getattr(self, f"value_{self.steps}").mean()

GLOBAL["calls"] += 1
x = x * GLOBAL["calls"]

GLOBAL["cache"].setdefault(x.shape, torch.ones(x.shape[-1]) * 0.3)
x = x + GLOBAL["cache"][x.shape]

LOG.append(tuple(x.shape))
x = x + 0.1 * len(LOG)

type(self).shared.append(1)
x = x * len(self.shared)

Net.factor = Net.factor * 0.9
x = x * self.factor

def inner(y, scale=self.config.slope):
    nonlocal x
    x = x + y * scale
    return x
inner(x)

run = [lambda y, k=k: y * k for k in (1, 2)]
x = run[0](x) + run[1](x)

x = (lambda f: f(f, x, 2))(lambda f, y, n: y if n == 0 else f(f, torch.tanh(y), n - 1))

assert x.dim() == 2, f"expected 2 dims, not {x.dim()}"
x = x * len(f"{x.shape}")

del self.config.names[2:]
self.config.names.append("relu")
x = x * len(self.config.names)

self.depth = self.depth % 3 + 1
x = x * self.depth

x = x * len(self) * (2 if self else 1)

x = x * (0.5 if "tanh" in self.names else 2)

values = dict(zip("ab", (x, x * 2)))
values |= {"c": values.pop("a")}
x = sum(values.values())

x = next((layer(x) for layer in self.children() if isinstance(layer, nn.Linear)), x)

x = max([x, x * 2], key=lambda t: t.shape[0])

x = x[..., [i for i in range(4) if i != self.steps % 4] + [0]]

x = torch.where(TABLE > 0.5, x, x * FACTOR)

x = x + torch.tensor([p.numel() for p in self.parameters()][:4]) * 0.01

x = x * self.config.gain + np.float32(0.25)

x = x + torch.from_numpy(self.schedule[:4]).float()

x = x * (-1) ** self.steps + (7 // 2) % 3 + divmod(9, 4)[1]

x += TABLE
x *= 0.5

y = x.clone()
y[0], y[-1] = x[-1], x[0]
x = y

keep = x
for _ in range(3):
    x = torch.tanh(x) + 0.1 * keep
else:
    x = x * 2

while self.config.depth < 4:
    self.config.depth += 1
    x = x + 0.1
""")

_CHANGES = listed("""
net.config.slope = 0.3

net.config.mode = names["Mode"].LARGE

net.config.names.reverse()

names["GLOBAL"]["scale"] = 3.0

names["FACTOR"] = 0.5

names["TABLE"].mul_(2)

names["TABLE"] = torch.full((4,), 0.7)

names["REGISTRY"]["tanh"] = torch.sigmoid

names["Base"].scale = 0.8

names["Net"].factor = 0.4

net.options.power = 1

net.options.flags["noise"] = 0.3

net.layers["a"] = torch.nn.ReLU()

net.activation = torch.sigmoid

net.partial = torch.relu

net.steps = 3

net.names.discard("tanh")

net.schedule[:] = 0.2

net.train(not net.training)

net.missing = 2.0

names["positions"].cache_clear()

names["positions"](4).fill_(0.4)

net.derived.weight.data.fill_(0.6)

net.depth = 2

net.table.clear(); net.table.update(x=1.5)

names["GLOBAL"]["cache"].clear()

net.state.value = torch.ones(4)

net.state.count = 5
""")


class Maker:
    """Makes one script from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def program(self) -> tuple[str, list[list[str]]]:
        """Return the source of a module, and what changes before each of its calls."""
        lines: list[str] = []
        for idiom in self._random.choices(_IDIOMS, k=self._random.randint(2, 5)):
            lines += idiom.split("\n")
        body = "".join(f"        {line}\n" for line in lines)
        result = self._random.choice(["x", "x", "(x, x.mean())", "{'x': x, 'n': self.steps}"])
        count = self._random.randint(3, 5)
        changes = [
            self._random.choices(_CHANGES, k=self._random.randint(0, 2)) for _ in range(count)
        ]
        changes[0] = []
        return f"{HEAD}{body}        return {result}\n", changes


class Script:
    """The names and the module of a script on one device."""

    def __init__(self, source: str, path: Path, device: str, ported: bool) -> None:
        path.write_text(source)
        self.names: dict[str, Any] = {"__name__": "script", "__file__": str(path)}
        exec(compile(source, path, "exec"), self.names)
        torch.manual_seed(0)
        self.net = self.names["Net"]().to(device)
        self.model = tpuport.convert(self.net) if ported else self.net
        self.ported, self.device = ported, device

    def run(self, changes: list[list[str]]) -> list[tuple[str, Any]]:
        """Call the module and return what the script sees; an exception of a call ends it."""
        seen: list[tuple[str, Any]] = []
        for number, statements in enumerate(changes):
            target = self.model.module if self.ported else self.net
            x = torch.linspace(-1, 1, 16).reshape(4, 4) + 0.1 * number
            x = x.to(self.device)
            try:
                for statement in statements:
                    exec(statement, {"net": target, "names": self.names, "torch": torch})
                seen += self._looked_at(f"call {number}", self.model(x))
            except Exception as error:
                seen.append((f"call {number}", error))
                return seen
        return seen

    def _looked_at(self, when: str, out: Any) -> list[tuple[str, Any]]:
        parts = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else [out]
        found: dict[str, Any] = {f"result {i}": part for i, part in enumerate(parts)}
        net: Any = self.model.module if self.ported else self.net
        if not self.ported:
            first = next(iter(parts))
            found["requires_grad"] = first.requires_grad
            gradients: tuple[Any, ...] = ()
            try:
                if first.requires_grad:
                    wanted = list(net.parameters())
                    gradients = torch.autograd.grad((first**2).mean(), wanted, allow_unused=True)
            except RuntimeError as error:  # the backward pass needs what was written in place
                found["gradients"] = type(error).__name__
            found |= {f"gradient {i}": value for i, value in enumerate(gradients)}
        found |= {"steps": net.steps, "depth": net.config.depth, "names": list(net.config.names)}
        found |= {"history": len(net.history), "counts": dict(net.counts), "table": dict(net.table)}
        found["count"] = net.state.count
        if not self.ported:
            found["state"] = net.state.value
            found |= {"calls": self.names["GLOBAL"]["calls"], "log": list(self.names["LOG"])}
            found |= {"factor": self.names["Net"].factor, "shared": len(self.names["Net"].shared)}
            found["scaled"] = self.names["scaled"].count
        return [(f"{when}, {name}", _described(value)) for name, value in found.items()]


def _described(value: Any) -> Any:
    if hasattr(value, "__jax_array__"):
        return torch.as_tensor(np.asarray(value))
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def verdict(source: str, changes: list[list[str]], folder: Path, how: str) -> tuple[str, str]:
    """Run a script twice and compare: "passes", "refused", "eager raises" or "differs"."""
    path = folder / "script.py"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = Script(source, path, "cpu", False).run(changes)
        if how == "convert":
            got = Script(source, path, "cpu", True).run(changes)
        else:
            with tpuport.porting():
                got = Script(source, path, "cuda", False).run(changes)
    wanted = dict(expected)
    have: Any
    for name, have in got:
        if isinstance(have, PortError) and not isinstance(have, ParityError):
            return "refused", str(have).partition("\n")[0]
        want = wanted.get(name)
        if type(want) is not type(have):
            return "differs", f"{name}: {want!r}; port: {have!r}"
        if isinstance(want, torch.Tensor) and isinstance(have, torch.Tensor):
            if want.shape != have.shape or not torch.allclose(want, have, 1e-3, 1e-5, True):
                return "differs", f"{name}: {want.tolist()}; port: {have.tolist()}"
        elif not isinstance(want, Exception) and want != have:
            return "differs", f"{name}: {want}; port: {have}"
    return "passes" if got[-1][0].split(",")[0] == expected[-1][0].split(",")[0] else "differs", ""


def _judged(seed: int, folder: Path) -> Iterator[Found]:
    source, changes = Maker(seed).program()
    shown = "\n".join([source[len(HEAD) :], *map(str, changes)])
    for how in ("convert", "porting"):
        yield Found(*verdict(source, changes, folder, how), shown, how)


if __name__ == "__main__":
    run_seeds(__doc__, _judged)
