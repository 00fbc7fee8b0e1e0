"""Random scripts over layers as research code writes them, by convert() and by porting().

Attention with caches and tables, codebooks, queues, momentum encoders, experts, graphs, masks,
custom autograd functions, inner gradients, flows, scans and their like are stacked at random. A
script calls and trains the network and changes it between the steps. Results, gradients, state,
and what is raised are compared with eager PyTorch after each step. Prints what differs:
`python -m benchmarks.research_scripts --count 300`.

`<<a|b>>` in the layers' text (research_layers.txt) stands for one of the two.
"""

import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import tpuport
from benchmarks import training_scripts
from benchmarks.seeds import Found, run_seeds, varied
from benchmarks.training_scripts import listed
from tpuport.foundation.errors import ParityError, PortError
from tpuport.tracing.scan_layers.stacked_params import unstack

_CHANGES = training_scripts.MODES + listed("""
saved = copy.deepcopy(net.state_dict())

net.load_state_dict(saved) if saved else None

for m in net.modules(): m.loss = m.logdet = m.energy = m.weights = None
net = copy.deepcopy(net)
optimizer = torch.optim.AdamW(net.parameters(), 0.01, eps=0.1)

for m in net.modules(): m.loss = m.logdet = m.energy = m.weights = None
ema = ema or copy.deepcopy(net)

ema = torch.optim.swa_utils.AveragedModel(net) if ema is None else ema
ema.update_parameters(net) if hasattr(ema, "update_parameters") else None

optimizer = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)

optimizer = torch.optim.RMSprop([p for p in net.parameters() if p.requires_grad], 0.01, eps=0.1)

scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
scheduler.step()

x = x[:1]

x = torch.cat([x, x * 0.5])

x = x[:, :4]

x = x[:, :5]

x = x.clone().requires_grad_(True)

x = x.transpose(0, 1).contiguous().transpose(0, 1)

for m in net.modules():
    if hasattr(m, "start"): m.start = 0

for m in net.modules():
    if hasattr(m, "hidden"): m.hidden = None

net.zero_grad()

with torch.no_grad():
    for p in net.parameters(): p.mul_(0.95)
""")
_CALLS = listed("""
out = net(x)

out = net(x)

out = net(x)

with torch.no_grad(): out = net(x)

out = net(head(net(x)))

out = (ema or net)(x)

out = LAYER(x)

with torch.autocast(device, dtype=torch.bfloat16): out = net(x)

given = {name: value * 1.1 for name, value in net.named_parameters()}
out = torch.func.functional_call(net, given, (x,))
""")
_LOSSES = listed("""
loss = total(out)

loss = total(out) + left(net)

loss = total(out) + left(net)

loss = left(net)

loss = None

with torch.no_grad(): target = head((ema or net)(x))
loss = (head(out).mean((0, 1)) - target.mean((0, 1)) - 0.3).square().sum()
""")
_ENDS = listed("""
optimizer.zero_grad(); backward(loss); optimizer.step()

optimizer.zero_grad(); backward(loss); optimizer.step()

backward(loss)
torch.nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], 0.5)
optimizer.step(); optimizer.zero_grad()

wanted = [p for p in net.parameters() if p.requires_grad]
if differentiable(loss): grads = torch.autograd.grad(loss, wanted, allow_unused=True)

backward(loss)
""")
_LEFT = """

def left(net):
    kept = [getattr(m, n, None) for m in net.modules() for n in ("loss", "logdet", "energy")]
    kept = [k.float().sum() for k in kept if torch.is_tensor(k) and k.requires_grad]
    return sum(kept, torch.zeros(()))
"""
_LAYERS = Path(__file__).with_name("research_layers.txt")
_INPUT = "x = torch.sin(torch.arange(96.0, device=device) * 1.3 + x[0, 0]).view(2, 6, 8)"


def layers() -> tuple[str, dict[str, str]]:
    """Return what stands before the classes of the layers' text, and the classes by name."""
    head, *parts = re.split(r"\n(?=class )", _LAYERS.read_text())
    return head, {one.partition("(")[0].removeprefix("class "): one.strip() for one in parts}


class Maker:
    """Makes one script from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def program(self) -> tuple[str, list[str]]:
        """Return the source of a network, and the statements of each step."""
        head, classes = layers()
        names = [name for name, one in classes.items() if "(nn.Module)" in one]
        used = self._random.sample(names, self._random.randint(1, 3))
        needed = [one for name, one in classes.items() if name in used or name not in names]
        body = "".join(f"        self.l{i} = {name}()\n" for i, name in enumerate(used))
        calls = "".join(f"        x = self.l{i}(x)\n" for i in range(len(used)))
        result = self._random.choice(["x", "x", "(x, x.mean())", "{'out': x}"])
        source = "\n\n".join([head.strip(), *needed, _LEFT])
        source += "\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()"
        source += f"\n{body}\n    def forward(self, x):\n{calls}        return {result}\n"
        source, _ = varied(source, self._random)
        # Eager PyTorch computes a block again with the parameters themselves, not the given ones.
        calls = [call for call in _CALLS if "Block" not in used or "functional" not in call]
        count = self._random.randint(3, 5)
        return source, [self._step(len(used), calls) for _ in range(count)]

    def _step(self, count: int, calls: list[str]) -> str:
        parts = [_INPUT, *self._random.choices(_CHANGES, k=self._random.randint(0, 2))]
        parts += (self._random.choice(some) for some in (calls, _LOSSES, _ENDS))
        return "\n".join(parts).replace("LAYER", f"net.l{self._random.randrange(count)}")


def of_convert(
    source: str,
    folder: Path,
    options: Mapping[str, Any] | None = None,
    prepare: Callable[[Any], Any] = lambda ported: None,
) -> tuple[str, str]:
    """Compare later calls, buffers and gradients of a converted network with eager PyTorch's.

    Args:
        source: defines the class `Net`.
        folder: for its file.
        options: of `tpuport.convert`.
        prepare: changes the port before its calls.
    """
    path = folder / "script.py"
    path.write_text(source)
    names: dict[str, Any] = {"__name__": "script", "__file__": str(path)}
    exec(compile(source, path, "exec"), names)
    torch.manual_seed(0)
    net = names["Net"]()
    inputs = [torch.sin(torch.arange(96.0) * 1.3 + i).view(2, 6, 8) for i in range(4)]
    inputs[2] = inputs[2][:, :4]
    number = 0
    try:
        ported = tpuport.convert(net, **(options or {}))
        prepare(ported)
        for number, x in enumerate(inputs):
            if number == 3:
                net.eval()
                ported.eval()
            have = _of_port(ported, x, number == 1)
            want = _of_eager(net, x, number == 1)
            for name in want.keys() & have.keys():
                a, b = want[name], have[name]
                # A bias before a normalization has a gradient of rounding alone.
                least = 1e-4 if name.startswith("gradient") else 2e-5
                least *= max(1.0, float(np.abs(a).max(initial=0.0)) / 10)
                if a.shape != b.shape or not np.allclose(a, b, 2e-3, least, equal_nan=True):
                    return "differs", f"call {number}, {name}: {a.tolist()}; port: {b.tolist()}"
    except PortError as error:
        kind = "differs" if isinstance(error, ParityError) else "refused"
        return kind, str(error).partition("\n")[0]
    except Exception as error:
        kind = "eager raises" if _raises(net, inputs[number], number == 1) else "differs"
        return kind, f"call {number}: {type(error).__name__}: {error}"
    return "passes", ""


def _raises(net: Any, x: torch.Tensor, differentiate: bool) -> bool:
    try:
        _of_eager(net, x, differentiate)
    except Exception:  # it is raised by a script that eager PyTorch refuses
        return True
    return False


def _of_port(ported: Any, x: torch.Tensor, differentiate: bool) -> dict[str, np.ndarray]:
    seen = {}
    if differentiate:
        buffers, key, array = ported.buffers, jax.random.key(0), jnp.asarray(x.numpy())

        def loss(params: Any) -> Any:
            return (_first(ported.apply(params, buffers, key, array)[0]) ** 2).sum()

        gradients = jax.jit(jax.grad(loss, allow_int=True))(unstack(ported.params))
        numbers = {k: v for k, v in gradients.items() if v.dtype == jnp.float32}
        seen = {f"gradient {k}": np.asarray(v) for k, v in numbers.items()}
    seen["result"] = np.asarray(_first(ported(x)))
    return seen | {f"buffer {k}": np.asarray(v) for k, v in unstack(ported.buffers).items()}


def _of_eager(net: Any, x: torch.Tensor, differentiate: bool) -> dict[str, np.ndarray]:
    seen = {}
    out = _first(net(x))
    if differentiate and out.requires_grad:
        parameters = dict(net.named_parameters())
        wanted = {name: value for name, value in parameters.items() if value.requires_grad}
        (out**2).sum().backward()
        found = {name: value.grad for name, value in wanted.items() if value.grad is not None}
        seen = {f"gradient {name}": value.numpy() for name, value in found.items()}
        net.zero_grad()
    seen["result"] = out.detach().numpy()
    buffers = dict(net.named_buffers())
    return seen | {f"buffer {name}": value.detach().numpy() for name, value in buffers.items()}


def _first(out: Any) -> Any:
    return training_scripts.head(out)


def _judged(seed: int, folder: Path) -> Iterator[Found]:
    source, steps = Maker(seed).program()
    shown = "\n---\n".join([source, *steps])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Found(*training_scripts.verdict(source, steps, folder), shown, "porting")
        yield Found(*of_convert(source, folder), shown, "convert")


if __name__ == "__main__":
    run_seeds(__doc__, _judged)
