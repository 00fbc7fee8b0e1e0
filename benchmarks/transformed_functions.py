"""Random functions under `torch.func`'s transforms, and under those of `torch.autograd`.

A script makes a small network and applies one to three transforms to a function of its parameters
or its input: grad, vjp, jvp, vmap, Jacobians and Hessians, `functional_call`, ensembles of stacked
modules. By porting() it runs as it stands; by convert() it is the forward pass of a module. Values,
shapes, dtypes and gradients through the result are compared with eager PyTorch.
Prints what differs: `python -m benchmarks.transformed_functions --count 300`.
"""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree

import tpuport
from benchmarks.seeds import Found, run_seeds
from tpuport.foundation.errors import PortError

_HEAD = """
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd import functional as AF
from torch.func import (
    functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, linearize,
    stack_module_state, vjp, vmap,
)
from torch.nn import functional as F


class Doubled(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3 * ctx.saved_tensors[0]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.linspace(-1, 1, 3))
        self.register_buffer("mean", torch.linspace(0.5, 1, 3))

    def part(self, x):
{part}
        return {result}

    def forward(self, x):
        names = dict(self.named_parameters())
{body}
        return result


class Inner(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net.part(x)
"""
_VALUES = (
    *("self.layer({a})", "self.other({a})", "torch.tanh({a}) * self.scale"),
    *("{a} + {b}", "{a} * {b}", "{a} / (1 + {b}.square())", "F.softmax({a}, -1)", "{a}.exp() / 4"),
    *("torch.where({a} > 0, {a}, {b} * 2)", "{a}.cumsum(-1)", "{a} @ self.layer.weight"),
    *("torch.einsum('...i,ji->...j', {a}, self.other.weight)", "{a}.flip(-1)", "{a} + self.mean"),
    *("{a}.sort(-1).values", "F.gelu({a})", "{a}.clone().mul_(2).add_({b})", "torch.sin({a})"),
    *("torch.stack([{a}, {b}]).mean(0)", "torch.cat([{a}, {b}], -1)[..., 1:4]", "{a}.roll(1, -1)"),
    *(
        "F.normalize({a}, dim=-1)",
        "torch.logsumexp({a}, -1, keepdim=True) * {b}",
        "{a}.detach() * {b}",
    ),
    *("Doubled.apply({a})", "{a}.amax(-1, keepdim=True) - {b}", "F.silu({a}) * {b}", "{a}.abs()"),
    *("torch.outer({a}.flatten()[:3], self.scale).mean(0) + {b}", "{a}[..., [2, 0, 1]]"),
    "{a}.new_zeros(3).index_add(0, torch.arange(3, device={a}.device) // 2, {a}.reshape(-1)[:3])",
    *("torch.linalg.norm({a}, dim=-1, keepdim=True) * {b}", "{a}.var(-1, keepdim=True) + {b}"),
    *("{a}.unsqueeze(0).expand(2, *{a}.shape).sum(0)", "torch.minimum({a}, {b}.detach())"),
)
# No LayerNorm: torch's third derivative of it takes its reciprocal deviation for a constant.
# Each transform takes a function of one row and gives a function of one row: f(x) -> a pytree.
_TRANSFORMS = (
    "lambda x: grad(lambda y: total({f}(y)))(x)",
    "lambda x: grad_and_value(lambda y: total({f}(y)))(x)",
    "lambda x: grad(lambda y: (total({f}(y)), {f}(y)), has_aux=True)(x)",
    "lambda x: vjp(lambda y: total({f}(y)) * y, x)[1](x.detach())[0]",
    "lambda x: jvp({f}, (x,), (torch.ones_like(x),))[1]",
    "lambda x: jvp({f}, (x,), (x.detach() * 2,))",
    "lambda x: jacrev({f})(x)",
    "lambda x: jacfwd({f})(x)",
    "lambda x: jacfwd({f}, randomness='same')(x)",
    "lambda x: jacrev({f}, chunk_size=2)(x)",
    "lambda x: hessian(lambda y: total({f}(y)))(x)",
    "lambda x: linearize({f}, x)[1](torch.ones_like(x))",
    "lambda x: vmap({f})(torch.stack([x, x * 2, -x]))",
    "lambda x: vmap({f}, in_dims=1, out_dims=-1)(torch.stack([x, x * 2], 1))",
    "lambda x: vmap({f}, chunk_size=2)(torch.stack([x, x + 1, x - 1]))",
    "lambda x: vmap(lambda y, z: total({f}(y)) * z, in_dims=(0, None))(torch.stack([x, x * 2]), x)",
)
# These differentiate by the graph that autograd records, which functions under the others have not.
_OUTERMOST = (
    "lambda x: AF.jacobian(lambda y: total({f}(y)) * y, x, create_graph=True)",
    "lambda x: AF.hessian(lambda y: total({f}(y)), x, create_graph=True)",
    "lambda x: AF.vjp(lambda y: total({f}(y)) * y, x, torch.ones_like(x), create_graph=True)",
    "lambda x: AF.jvp(lambda y: total({f}(y)) * y, x, torch.ones_like(x), create_graph=True)",
    "lambda x: AF.hvp(lambda y: total({f}(y)), x, torch.ones_like(x), create_graph=True)",
    "lambda x: AF.jacobian(lambda y: total({f}(y)) * y, x, vectorize=True, create_graph=True)",
    "lambda x: dual(lambda y: total({f}(y)) * y, x)",
)
_STARTS = (
    "self.part",
    "self.part",
    "lambda x: functional_call(Inner(self), {'net.' + n: p * 1.5 for n, p in names.items()}, (x,))",
    "lambda x: functional_call(Inner(self), {'net.scale': x * 0.5}, (x,))",
    "lambda x: grad(lambda p: total(functional_call(Inner(self), p, (x,))))(inner(names))",
    "lambda x: jvp(lambda p: functional_call(Inner(self), p, (x,)), *[(inner(names),)] * 2)",
    "lambda x: vmap(lambda p: functional_call(Inner(self), p, (x,)))(stacked(self, names))",
)
_HELPERS = """
def total(values):
    found = [v.square().sum() + v.sum() for v in torch.utils._pytree.tree_leaves(values)]
    return sum(found[1:], found[0])


def inner(names):
    return {"net." + name: value for name, value in names.items()}


def stacked(net, names):
    return {"net." + n: torch.stack([p, p * 0.5]) for n, p in names.items()}


def dual(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
"""


class Maker:
    """Makes one script from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def program(self) -> str:
        """Return the source of a module."""
        chosen, names, lines = self._random, ["x"], []
        for number in range(chosen.randint(1, 4)):
            value = chosen.choice(_VALUES).format(a=chosen.choice(names), b=chosen.choice(names))
            names.append(f"t{number}")
            lines.append(f"        t{number} = {value}")
        body = [f"f0 = {chosen.choice(_STARTS)}"]
        count = chosen.choice([1, 1, 2, 2, 3])
        is_outermost = chosen.random() < 0.25
        for number in range(count):
            is_last = number == count - 1
            kinds = _OUTERMOST if is_outermost and is_last else _TRANSFORMS
            body.append(f"f{number + 1} = {chosen.choice(kinds).format(f=f'f{number}')}")
        lasts = ["f{0}(x[0])", "[f{0}(y) for y in x]"]
        lasts += [] if is_outermost else ["vmap(f{0})(x)", "vmap(f{0})(x)"]
        last = chosen.choice(lasts)
        body.append("result = " + last.format(count))
        head = _HEAD.replace("{part}", "\n".join(lines)).replace("{result}", names[-1])
        return head.replace("{body}", "\n".join(f"        {line}" for line in body)) + _HELPERS


def _seen(net: Any, where: Any, ported: Any = None) -> list[tuple[str, Any]]:
    seen: list[tuple[str, Any]] = []
    for number in range(2):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(2, 3, generator=generator).to(where).requires_grad_()
        values = _pytree.tree_leaves((ported or net)(x))
        seen += [(f"value {place}", value) for place, value in enumerate(values)]
        wanted = [v for v in values if v.requires_grad]
        if ported is not None:  # its gradients are compared by convert's own verification
            continue
        for parameter in net.parameters():
            parameter.grad = None
        # A result that only zeros reach may require grad or not: torch's own transforms vary.
        if wanted:
            torch.stack([v.square().sum() for v in wanted]).sum().backward()
        leaves = {**dict(net.named_parameters()), "x": x}
        for name, leaf in leaves.items():
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            seen.append((f"gradient of {name}", gradient))
    return [(n, v.detach().cpu().clone() if torch.is_tensor(v) else v) for n, v in seen]


def _differ(want: Any, have: Any, tolerance: float = 1e-4) -> bool:
    if not (isinstance(want, torch.Tensor) and isinstance(have, torch.Tensor)):
        return want is not have and want != have
    if want.shape != have.shape or want.dtype != have.dtype:
        return True
    want, have = want.double(), have.double()
    scale = float(want.abs().nan_to_num(0).max()) if want.numel() else 0.0
    return not torch.allclose(want, have, tolerance, tolerance * (0.1 + scale), equal_nan=True)


def _net(source: str, path: Path) -> Any:
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(source, path, "exec"), names)
    return names["Net"]()


def verdict(source: str, path: Path, how: str) -> tuple[str, str]:
    """Run a module in eager PyTorch and ported."""
    path.write_text(source)
    try:
        wanted = _seen(_net(source, path), "cpu")
    except Exception as error:
        return "eager raises", str(error).partition("\n")[0][:150]
    try:
        if how == "porting":
            with tpuport.porting():
                found = _seen(_net(source, path).to("cuda"), "cuda")
        else:
            net = _net(source, path)
            found = _seen(net, "cpu", tpuport.convert(net))
    except PortError as error:
        return "refused", str(error)[:600]
    except Exception as error:
        return "differs", f"raises {type(error).__name__}: {error}"
    if how == "convert":
        wanted = [(name, value) for name, value in wanted if name.startswith("value")]
    if len(wanted) != len(found):
        return "differs", f"{[n for n, _ in wanted]}; port: {[n for n, _ in found]}"
    for place, ((name, want), (_, have)) in enumerate(zip(wanted, found, strict=True)):
        if _differ(want, have):
            exact = _seen(_net(source, path).double(), torch.float64)
            rough = any(
                _differ(a, b.to(a.dtype) if torch.is_tensor(a) else b, 1e-5)
                for (_, a), (_, b) in zip(wanted, exact, strict=True)
            )
            return "chaotic" if rough else "differs", f"{name} ({place}): {want}; port: {have}"
    return "passes", ""


def _judged(seed: int, folder: Path) -> Iterator[Found]:
    source = Maker(seed).program()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for how in ("porting", "convert"):
            kind, what = verdict(source, folder / f"script{seed}{how}.py", how)
            yield Found(kind, what, source, how)


if __name__ == "__main__":
    run_seeds(__doc__, _judged)
