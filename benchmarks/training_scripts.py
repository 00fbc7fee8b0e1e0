"""Random training scripts over nested modules, each run in eager PyTorch and under porting().

A network of small blocks, some of them shared or nested, with buffers, caches, hooks and tied
weights. A script trains it with an optimizer and does between the steps what scripts do: it freezes
and exchanges layers, loads weights, averages them, copies the network, adds and removes hooks,
changes the training mode and calls parts of the network by themselves. Results, gradients, state,
and what is raised are compared after each step. Prints what differs:
`python -m benchmarks.training_scripts --count 300`.
"""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tpuport
from benchmarks.seeds import Found, run_seeds
from recipes.hunyuan_video.components import default_dtype
from tpuport.foundation.errors import ParityError, PortError

HEAD = '''
import copy
import io

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """Adds what a layer gives, scaled by a parameter."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + self.scale * self.inner(x)


class Running(nn.Module):
    """Subtracts a running mean that training updates."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.steps = 0

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.1)
                self.count += 1
        return x - self.mean


class Caches(nn.Module):
    """Keeps its last input, and mixes it into the next call."""

    def __init__(self, size):
        super().__init__()
        self.mix, self.last, self.log = nn.Linear(size, size), None, []

    def forward(self, x):
        y = self.mix(x)
        if self.last is not None and self.last.shape == x.shape:
            y = y + 0.1 * self.last
        self.last = x.detach()
        return y


class Losses(nn.Module):
    """Leaves a loss in an attribute for the script."""

    def __init__(self, size):
        super().__init__()
        self.gate, self.aux = nn.Linear(size, size), None

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        self.aux = gate.mean()
        return x * gate


class Twice(nn.Module):
    """Calls one layer twice, by keyword the second time."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return torch.tanh(self.inner(self.inner(x)))


class Options:
    def __init__(self):
        self.slope, self.use_skip, self.power = 0.1, True, 2


class Configured(nn.Module):
    """Reads an object of options, a global and a class attribute."""

    bias = 0.25

    def __init__(self, size, options):
        super().__init__()
        self.options, self.weight = options, nn.Parameter(torch.eye(size) * 0.9)

    def forward(self, x):
        y = F.leaky_relu(x @ self.weight, self.options.slope) + self.bias * SCALE["value"]
        return y + x if self.options.use_skip else y


SCALE = {"value": 1.0}


def doubling(module, args, output):
    return output * 1.5


def shifting(module, args):
    return (args[0] + 0.1,)


def keeping(module, args, output):
    module.seen = output.detach()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        options = Options()
'''
_SIZE = 4
_STATEFUL = ("Running", "Caches", "BatchNorm", "spectral_norm")
# What eager PyTorch refuses of views and versions, and a port may not.
_OF_AUTOGRAD = ("modified by an inplace", "A view was created", "a view of a leaf")
# And of checkpoints, and of dtypes by autocast's lists for a CPU, which are not those for CUDA.
_OF_AUTOGRAD += ("When use_reentrant=True", "must have the same scalar type")


def listed(text: str) -> list[str]:
    """Return the statements of a text, which empty lines part."""
    return text.strip().split("\n\n")


# What a script does before a call, how it calls, what it differentiates and what it does then.
MODES = listed("""
net.eval()

net.train()

LAYER.eval()

LAYER.requires_grad_(False)

LAYER.requires_grad_(True)
""")
_CHANGES = MODES + listed("""
LAYER.register_forward_hook(doubling)

LAYER.register_forward_pre_hook(shifting)

LAYER.register_forward_hook(keeping)

handles.append(LAYER.register_forward_hook(doubling))

[h.remove() for h in handles]; handles.clear()

net.l0 = copy.deepcopy(LAYER)

net.l0, net.l1 = net.l1, net.l0

net.l0 = nn.Sequential(LAYER, nn.Tanh())

LAYER.forward = OTHER.forward

net.extra = nn.Linear(4, 4).to(device)

del net.extra

saved = copy.deepcopy(net.state_dict())

net.load_state_dict(saved) if saved else None

SCALE["value"] *= 2.0

Configured.bias = 0.5

for m in net.modules():
    if isinstance(m, Configured): m.options.slope = 0.3

for m in net.modules():
    if isinstance(m, Configured): m.options.use_skip = False

net.apply(lambda m: setattr(m, "steps", 3) if isinstance(m, Running) else None)

for m in net.modules():
    if isinstance(m, Caches): m.last = None

net = copy.deepcopy(net)

net = copy.deepcopy(net)
optimizer = torch.optim.SGD(net.parameters(), 0.1)

trained = [p for p in net.parameters() if p.requires_grad]
optimizer = torch.optim.Adam(trained, 0.01, eps=0.1)

optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9, weight_decay=0.01)

ema = ema or copy.deepcopy(net)

for a, b in zip(ema.parameters() if ema else (), net.parameters()):
    a.data.mul_(0.9).add_(b.data, alpha=0.1)

with torch.no_grad():
    for p in net.parameters(): p.mul_(0.95)

with torch.no_grad():
    for b in net.buffers():
        if b.is_floating_point(): b.add_(0.01)

for m in net.modules():
    if isinstance(m, nn.Linear) and m._parameters.get("weight") is not None:
        m.weight = nn.Parameter(m.weight.detach() * 0.9)
        break

for m in net.modules():
    if isinstance(m, nn.Linear): m.bias = None

torch.nn.init.constant_(next(net.parameters()), 0.3)

net.double(); net.float()

net.zero_grad(set_to_none=False)

x = x * 0.5

x = torch.cat([x, x])

x = x[:3]

x = x.clone().requires_grad_(True)

x = x.t().contiguous().t()

next(net.parameters()).register_hook(lambda g: g * 2)

buffer = io.BytesIO()
torch.save(net.state_dict(), buffer)
buffer.seek(0)
saved = torch.load(buffer)

flat = nn.utils.parameters_to_vector(net.parameters())
nn.utils.vector_to_parameters(flat * 0.99, net.parameters())

scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
scheduler.step()

optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1, device=device))]})

for m in net.modules():
    if isinstance(m, nn.BatchNorm1d): m.eval()

for p in net.parameters(): p.grad = None if p.grad is None else p.grad * 0.5

net.l1 = LAYER

other = other or copy.deepcopy(net)

other = other or nn.Sequential(nn.Linear(4, 4), net.l0).to(device)
""")
_CALLS = listed("""
out = net(x)

out = net(x)

out = net(x)

out = net(x=x)

out = net(x, skip=True)

out = LAYER(x)

out = net(head(net(x)))

with torch.no_grad(): out = net(x)

with torch.inference_mode(): out = net(x)

given = {name: value * 1.1 for name, value in net.named_parameters()}
out = torch.func.functional_call(net, given, (x,))

out = (ema or net)(x)

first = net(x)
out = net(x * 0.5)

out = torch.utils.checkpoint.checkpoint(net, x, use_reentrant=False)

out = head((other or net)(head(net(x))))

out = head(net(x)).mul(2).add_(1)

out = torch.stack([head(net(x)) for _ in range(2)]).mean(0)

out = net(x)
out = out if head(out) is not out else torch.cat([out, x])
""")
_LOSSES = listed("""
loss = total(out)

loss = total(out)

loss = total(out)

loss = total(out) + auxiliary(net)

loss = total(out) * 0.5 + (total(first) if first is not None else 0)

loss = F.mse_loss(head(out), torch.zeros_like(head(out)))

loss = None

with torch.no_grad(): target = head((ema or net)(x * 0.9))
loss = F.mse_loss(head(out)[:3], target[:3])

loss = F.cross_entropy(head(out), torch.arange(len(head(out)), device=device) % 4)

a, b = head(out), head(net(x * 0.9))
loss = F.cross_entropy(a[:3] @ b[:3].t(), torch.arange(3, device=device))

z = (x.detach() * 0.9).requires_grad_(True)
slopes = torch.autograd.grad(head(net(z)).sum(), z, create_graph=True)[0]
loss = (slopes.norm(dim=1) - 1).square().mean() + total(out)

noise = torch.linspace(0, 0.1, 4, device=device)
loss = total(out) - 0.1 * head(net(x + noise)).sigmoid().log().mean()
""")
_ENDS = listed("""
optimizer.zero_grad(); backward(loss); optimizer.step()

optimizer.zero_grad(); backward(loss); optimizer.step()

backward(loss)

backward(loss)
nn.utils.clip_grad_norm_(net.parameters(), 0.1); optimizer.step()

backward(loss, retain_graph=True); backward(loss)
optimizer.step(); optimizer.zero_grad()

wanted = [p for p in net.parameters() if p.requires_grad]
if differentiable(loss):
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)

def closure():
    optimizer.zero_grad()
    value = total(net(x)) * 0.1
    backward(value)
    return value
optimizer.step(closure)

optimizer.zero_grad()
for part in (0.5, 0.25):
    backward(loss * part if differentiable(loss) else None, retain_graph=True)
optimizer.step()

backward(loss)
for p in net.parameters():
    if p.grad is not None: p.data.add_(p.grad, alpha=-0.05)
net.zero_grad()
""")


class Maker:
    """Makes one script from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._made = ""

    def program(self) -> tuple[str, list[str]]:
        """Return the source of a module, and the statements of each step."""
        count = self._random.randint(2, 5)
        lines = [f"self.l{i} = {self._block(0)}" for i in range(count)]
        if self._random.random() < 0.2:
            lines.append(f"self.l{count - 1} = self.l0")
        if self._random.random() < 0.2:
            lines.append(f"self.head = nn.Linear({_SIZE}, {_SIZE})")
            lines.append(
                "self.tail = nn.Linear(4, 4, bias=False); self.tail.weight = self.head.weight"
            )
        calls = [f"x = self.l{self._random.randrange(count)}(x)" for _ in range(count + 1)]
        if "self.head" in "".join(lines):
            calls += ["x = self.head(x)", "x = self.tail(x)"]
        if self._random.random() < 0.3:
            calls.insert(1, "if self.training: x = x * 1.1")
        if self._random.random() < 0.3:
            calls.insert(1, "if skip: x = x * 0.5")
        result = self._random.choice(
            ["x", "x", "(x, h)", "{'out': x, 'hidden': h}", "[x, x.mean()]", "x, None"]
        )
        self._made = "".join(lines)
        source = HEAD + "".join(f"        {line}\n" for line in lines)
        source += "\n    def forward(self, x, skip=False):\n        h = x * 2\n"
        source += "".join(f"        {line}\n" for line in calls) + f"        return {result}\n"
        steps = [self._step(count) for _ in range(self._random.randint(3, 6))]
        return source, steps

    def _block(self, depth: int) -> str:
        size = _SIZE
        kinds = [
            f"nn.Linear({size}, {size})",
            f"Running({size})",
            f"Caches({size})",
            f"Losses({size})",
            f"Configured({size}, options)",
            f"nn.BatchNorm1d({size})",
            f"nn.LayerNorm({size})",
            f"nn.Sequential(nn.Linear({size}, {size}), nn.ReLU())",
            f"nn.utils.parametrizations.weight_norm(nn.Linear({size}, {size}))",
            f"nn.utils.spectral_norm(nn.Linear({size}, {size}))",
        ]
        if depth < 2:
            inner = self._block(depth + 1)
            kinds += [f"Residual({inner})", f"Twice({inner})", f"nn.Sequential({inner}, nn.Tanh())"]
            kinds += [f"nn.ModuleList([{inner}])[0]"]
        return self._random.choice(kinds)

    def _step(self, count: int) -> str:
        layer, other = (f"net.l{self._random.randrange(count)}" for _ in range(2))
        # Eager PyTorch changes state again where the backward pass computes a block again.
        has_state = any(kind in self._made for kind in _STATEFUL)
        calls = [call for call in _CALLS if not (has_state and "checkpoint" in call)]
        parts = self._random.choices(_CHANGES, k=self._random.randint(0, 3))
        parts += (self._random.choice(some) for some in (calls, _LOSSES, _ENDS))
        return "\n".join(parts).replace("LAYER", layer).replace("OTHER", other)


def head(out: Any) -> torch.Tensor:
    """Return the first tensor of a result."""
    if isinstance(out, dict):
        return out["out"]
    return out[0] if isinstance(out, tuple | list) else out


def total(out: Any) -> Any:
    """Return the sum of squares of all tensors of a result."""
    parts = (
        out.values() if isinstance(out, dict) else out if isinstance(out, tuple | list) else [out]
    )
    return sum((part**2).sum() for part in parts if part is not None)


def auxiliary(net: Any) -> Any:
    """Return the sum of the losses that layers left."""
    return sum(m.aux for m in net.modules() if getattr(m, "aux", None) is not None)


def differentiable(loss: Any) -> bool:
    """Return whether a loss has a graph."""
    return isinstance(loss, torch.Tensor) and loss.requires_grad


def backward(loss: Any, **options: Any) -> None:
    """Differentiate a loss that has a graph."""
    if differentiable(loss):
        loss.backward(**options)


def run(
    source: str, steps: list[str], device: str, path: Path, dtype: torch.dtype = torch.float32
) -> list[tuple[str, Any]]:
    """Run a script on a device and return what it sees; an exception of a step ends it."""
    path.write_text(source)
    names: dict[str, Any] = {"__name__": "script", "__file__": str(path)}
    exec(compile(source, path, "exec"), names)
    torch.manual_seed(0)
    net = names["Net"]().to(device, dtype)
    names |= {
        "net": net,
        "device": device,
        "handles": [],
        "saved": None,
        "ema": None,
        "other": None,
        "first": None,
    }
    names |= {"head": head, "total": total, "auxiliary": auxiliary, "backward": backward}
    names |= {"differentiable": differentiable, "grads": None, "out": None}
    names["optimizer"] = torch.optim.SGD([*net.parameters(), torch.ones(1)], 0.1)
    seen: list[tuple[str, Any]] = []
    with default_dtype(dtype):
        _run_steps(steps, names, seen)
    return seen


def _run_steps(steps: list[str], names: dict[str, Any], seen: list[tuple[str, Any]]) -> None:
    for number, step in enumerate(steps):
        names["x"] = (torch.sin(torch.arange(20.0) * 1.7 + number).reshape(5, 4)).to(
            names["device"]
        )
        names["first"] = names["grads"] = None
        try:
            exec(step, names)
        except Exception as error:
            seen.append((f"step {number}", error))
            return
        seen += _looked_at(f"step {number}", names)


def _looked_at(when: str, names: dict[str, Any]) -> list[tuple[str, Any]]:
    out, net, x = names["out"], names["net"], names["x"]
    seen = {f"result {name}": part for name, part in _parts(out)}
    seen["kind of result"] = type(out).__name__
    seen |= {f"gradient {number}": value for number, value in enumerate(names["grads"] or ())}
    seen["gradient of x"] = x.grad if x.is_leaf else None
    for model in ("net", "ema", "other"):
        held = names[model]
        if held is not None:
            seen |= {f"{model}.{name}": value for name, value in held.state_dict().items()}
            gradients = ((name, p.grad) for name, p in held.named_parameters())
            seen |= {f"gradient of {model}.{name}": value for name, value in gradients}
    for name, module in net.named_modules():
        kept = ("last", "aux", "seen", "steps")
        seen |= {f"{name}.{one}": getattr(module, one, None) for one in kept}
    return [(f"{when}, {name}", _described(value)) for name, value in seen.items()]


def _parts(out: Any) -> list[tuple[Any, Any]]:
    if isinstance(out, dict):
        return list(out.items())
    return list(enumerate(out if isinstance(out, tuple | list) else [out]))


def _described(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().cpu().clone(), value.requires_grad, value.dtype


def verdict(source: str, steps: list[str], folder: Path) -> tuple[str, str]:
    """Run a script twice and compare: "passes", "refused", "eager raises" or "differs".

    It is "chaotic" if eager PyTorch in float32 is as far from float64 as the port.
    """
    path = folder / "script.py"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = run(source, steps, "cpu", path)
        last = expected[-1][1]
        if isinstance(last, Exception) and any(text in str(last) for text in _OF_AUTOGRAD):
            return "eager raises", str(last)
        with tpuport.porting():
            got = run(source, steps, "cuda", path)
        for index, (want, have) in enumerate(zip(expected, got, strict=False)):
            known = steps[: int(want[0].split(",")[0].removeprefix("step ")) + 1]
            # Rounding to bfloat16 in other places, which the weights keep.
            is_coarse = any("autocast" in step for step in known)
            kind, what = _compared(*want, *have, is_coarse=is_coarse)
            if kind == "passes":
                continue
            if isinstance(want[1], tuple) and isinstance(have[1], tuple):
                if _is_rounding(want[1][0], have[1][0], index, source, steps, path):
                    return "chaotic", want[0]
            return kind, what
    return ("passes" if len(expected) == len(got) else "differs"), ""


def _compared(name: str, want: Any, same: str, have: Any, *, is_coarse: bool) -> tuple[str, str]:
    if isinstance(have, PortError) and not isinstance(have, ParityError):
        return "refused", str(have).partition("\n")[0]
    if name != same or type(want) is not type(have) or isinstance(have, ParityError):
        return "differs", f"{name}: {want!r}; port: {same}: {have!r}"
    if isinstance(want, tuple):
        (a, *kind), (b, *other) = want, have
        if a.shape != b.shape or kind != other:
            return "differs", f"{name}: {a.shape}, {kind}; port: {b.shape}, {other}"
        near: Any = {"rtol": 1e-3, "atol": 1e-5}
        if is_coarse and a.is_floating_point() and a.numel():
            near = {"rtol": 2e-2, "atol": 2e-2 * float(a.abs().nan_to_num().max())}
        if not torch.allclose(a, b, **near, equal_nan=True):
            return "differs", f"{name}: {a.tolist()}; port: {b.tolist()}"
    elif not isinstance(want, Exception) and want != have:
        return "differs", f"{name}: {want}; port: {have}"
    return "passes", ""


def _is_rounding(
    want: torch.Tensor, have: torch.Tensor, index: int, source: str, steps: list[str], path: Path
) -> bool:
    """Return whether eager PyTorch in float32 is about as far from float64 as the port is."""
    if want.shape != have.shape:
        return False
    doubled = [step.replace(".float()", ".double()") for step in steps]
    exact = run(source, doubled, "cpu", path, torch.float64)
    if index >= len(exact) or not isinstance(exact[index][1], tuple):
        return False  # the script does not run in float64
    true = exact[index][1][0].double()
    return bool(((have - true).abs() <= 8 * (want - true).abs().max() + 1e-5).all())


def _judged(seed: int, folder: Path) -> Iterator[Found]:
    source, steps = Maker(seed).program()
    shown = "\n---\n".join([source[len(HEAD) :], *steps])
    yield Found(*verdict(source, steps, folder), shown)


if __name__ == "__main__":
    run_seeds(__doc__, _judged)
