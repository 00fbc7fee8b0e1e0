"""Random trainings whose modules are changed between the steps, as people change them.

Scripts put hooks on modules, tensors and parameters, parametrize, prune and fuse layers, put LoRA
around them, replace, tie, freeze, copy and pickle them, load state, swap parameters, change dtypes
and average weights, with a step of training or a call after each. Values, gradients, state,
keys and what hooks saw are compared with eager PyTorch by porting().
Prints what differs: `python -m benchmarks.edited_modules --count 300`.
"""

import random
import sys
import textwrap
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tpuport
from benchmarks.seeds import Found, run_seeds, varied
from tpuport.foundation.errors import PortError

_HEAD = """
import copy, io, pickle
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrize, parametrizations, prune
from torch.nn.utils.fusion import fuse_linear_bn_eval


class Low(nn.Module):
    def __init__(self, layer, rank=2):
        super().__init__()
        self.base, self.on = layer, True
        self.a = nn.Parameter(torch.full((rank, layer.in_features), 0.1, device=DEVICE))
        self.b = nn.Parameter(torch.linspace(-1, 1, layer.out_features * rank, device=DEVICE)
                              .reshape(layer.out_features, rank))

    def forward(self, x):
        out = self.base(x)
        return out + x @ self.a.T @ self.b.T if self.on else out


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(1.5, device=DEVICE))

    def forward(self, weight):
        return weight * self.factor

    def right_inverse(self, weight):
        return weight / self.factor.detach()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.out, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)
        self.scale = 1.0

    def forward(self, x, shift=None):
        h = self.out(torch.tanh(self.fc(self.norm(x)))) * self.scale
        return x + h if shift is None else x + h + shift


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        # A bias before a batch norm has a gradient of rounding alone.
        self.first, self.bn = nn.Linear(4, 4, bias=False), nn.BatchNorm1d(4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 4)
        self.named = nn.ModuleDict({"u": nn.Linear(4, 4), "v": nn.Identity()})
        self.gains = nn.ParameterList([torch.full((4,), 0.5), torch.full((4,), 2.0)])
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("kept", torch.ones(4), persistent=False)
        self.extra = None

    def forward(self, x):
        h = self.bn(self.first(x))
        for place, block in enumerate(self.blocks):
            h = block(h, shift=self.kept if place else None)
            h = h * self.gains[place % len(self.gains)]
        for name in self.named:
            h = self.named[name](h)
        if self.extra is not None:
            h = h + self.extra
        if self.training:
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return self.head(h - self.mean)


def batch(number):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(6, 4, generator=generator).to(DEVICE, net.head.weight.dtype)


def note(name, value):
    seen.append((name, value.detach().clone() if torch.is_tensor(value) else value))


def step(number):
    optimizer.zero_grad()
    out = net(batch(number))
    loss = out.square().mean() + out[:, 0].sum() * 0.1
    loss.backward()
    note("loss", loss)
    for name, parameter in net.named_parameters():
        note("gradient of " + name, parameter.grad)
    optimizer.step()
    look()


def call(number):
    with torch.no_grad():
        note("called", net(batch(number)))


def look():
    for name, value in net.state_dict().items():
        note(name, value)
    note("keys", list(net.state_dict()))
    note("flags", [(n, p.requires_grad, str(p.dtype)) for n, p in net.named_parameters()])
    note("modules", [(n, type(m).__name__, m.training) for n, m in net.named_modules()])


def make_optimizer():
    kind, settings = OPTIMIZER
    wanted = [p for p in net.parameters() if p.requires_grad]
    return getattr(torch.optim, kind)(wanted, **settings)


seen, handles, saved = [], [], {}
net = Net().to(DEVICE)
optimizer = make_optimizer()
"""
_LINEARS = "first|head|blocks[0].fc|blocks[1].fc|blocks[0].out|blocks[1].out|named['u']"
_MODULES = _LINEARS + "|bn|blocks[0]|blocks[1]|blocks[0].norm"
_RENEW = "\noptimizer = make_optimizer()"
# Statements with alternatives in <<...>>; {M} is a module, {L} a linear layer, {k} a number.
_EDITS = (
    "handles.append(net.{M}.register_forward_hook(lambda m, a, out: out * <<2|0.5>>))",
    "handles.append(net.{M}.register_forward_hook(lambda m, a, out: note('out', out)))",
    "handles.append(net.{M}.register_forward_hook(lambda m, a, k, out: out + a[0], with_kwargs=True"
    "<<|, prepend=True|, always_call=True>>))",
    "handles.append(net.{M}.register_forward_pre_hook(lambda m, a: <<(a[0] * 2,)|a[0] + 1|None>>))",
    "handles.append(net.blocks[1].register_forward_pre_hook("
    "lambda m, a, k: (a, {**k, 'shift': k['shift'] * 2}), with_kwargs=True))",
    "handles.append(net.{M}.register_full_backward_hook("
    "lambda m, into, out: <<None|tuple(g * 2 if g is not None else g for g in into)>>))",
    "handles.append(net.{M}.register_full_backward_hook("
    "lambda m, into, out: note('backward', out[0])))",
    "handles.append(net.{M}.register_full_backward_pre_hook(lambda m, out: (out[0] * 3,)))",
    "handles.append(net.{L}.<<weight|bias>>.register_hook(lambda g: g * <<0|0.5|2>>))"
    " if getattr(net.{L}, 'bias', None) is not None and net.{L}.<<weight|bias>>.requires_grad "
    "else None",
    "handles.append(next(net.{L}.parameters()).register_post_accumulate_grad_hook("
    "lambda p: note('accumulated', p.grad))) if next(net.{L}.parameters()).requires_grad else None",
    "saved['count'] = 0\n"
    "def counted(m, a, out):\n    saved['count'] += 1\n    saved['out'] = out.detach()\n"
    "    note('count', saved['count'])\n"
    "handles.append(net.{M}.register_forward_hook(counted))",
    "handles and handles.pop(<<0|-1>>).remove()",
    "handles and handles.pop(<<0|-1>>).remove()",
    "parametrize.register_parametrization(net.{L}, 'weight', <<Symmetric|Scaled>>())" + _RENEW,
    "if parametrize.is_parametrized(net.{L}):\n"
    "    parametrize.remove_parametrizations(net.{L}, 'weight', leave_parametrized=<<True|False>>)"
    + _RENEW,
    "parametrizations.<<weight_norm|orthogonal|spectral_norm>>(net.{L})" + _RENEW,
    "with parametrize.cached():\n    note('twice', net(net(batch({k}))))",
    "prune.<<l1_unstructured|random_unstructured>>(net.{L}, 'weight', <<amount=0.0|amount=1.0>>)"
    + _RENEW,
    "prune.l1_unstructured(net.{L}, 'weight', <<0.3|5>>)" + _RENEW,
    "prune.ln_structured(net.{L}, 'weight', 0.5, n=2, dim=<<0|1>>)" + _RENEW,
    "prune.custom_from_mask(net.{L}, 'weight', net.{L}.weight.detach().abs() > 0.2)" + _RENEW,
    "if prune.is_pruned(net.{L}):\n    prune.remove(net.{L}, 'weight')" + _RENEW,
    "net.{L} = Low(net.{L}) if isinstance(net.{L}, nn.Linear) else net.{L}.base" + _RENEW,
    "net.{L} = Low(net.{L})\nnet.{L}.base.requires_grad_(False)" + _RENEW,
    "for module in net.modules():\n    if isinstance(module, Low):\n"
    "        module.on = not module.on",
    "for module in net.modules():\n    if isinstance(module, Low):\n"
    "        with torch.no_grad():\n"
    "            module.base.weight += module.b @ module.a\n            module.b.zero_()",
    "net.blocks.append(Block().to(DEVICE))" + _RENEW,
    "net.blocks = nn.ModuleList(list(net.blocks)[::-1])",
    "net.blocks.append(<<copy.deepcopy(net.blocks[0])|net.blocks[0]>>)" + _RENEW,
    "if len(net.blocks) > 2:\n    del net.blocks[<<0|-1>>]" + _RENEW,
    "net.blocks.insert(1, Block().to(DEVICE))" + _RENEW,
    "net.named['<<v|w>>'] = nn.<<Tanh()|Identity()|Linear(4, 4).to(DEVICE)|GELU()>>" + _RENEW,
    "net.named.pop('u')\nnet.named['u'] = nn.Linear(4, 4).to(DEVICE)" + _RENEW,
    "net.gains.append(torch.full((4,), 0.7, device=DEVICE))" + _RENEW,
    "net.gains[0] = nn.Parameter(torch.full((4,), 0.7, device=DEVICE))" + _RENEW,
    "net.extra = <<None|torch.full((4,), 0.3, device=DEVICE)|"
    "nn.Parameter(torch.ones(4, device=DEVICE))>>" + _RENEW,
    "net.blocks[<<0|1>>].scale = <<0.5|2.0|net.gains[0]|"
    "nn.Parameter(torch.ones(4, device=DEVICE))>>" + _RENEW,
    "net.head.weight = net.first.weight" + _RENEW,
    "net.head.weight = nn.Parameter(net.head.weight.detach().clone())" + _RENEW,
    "net.{M}.requires_grad_(<<False|True>>)" + _RENEW,
    "net.{M}.<<eval|train>>()",
    "net.<<eval|train>>()",
    "net.apply(lambda m: nn.init.constant_(m.bias, 0.1) if isinstance(m, nn.LayerNorm) else None)",
    "net.bn.reset_running_stats()",
    "net.bn.momentum = <<0.5|None>>",
    "net.bn.track_running_stats = <<False|True>>",
    "saved['state'] = <<copy.deepcopy(net.state_dict())|net.state_dict()"
    "|{n: v.clone() for n, v in net.state_dict().items()}>>",
    "if 'state' in saved:\n    note('loaded', str(net.load_state_dict(saved['state'], strict=False"
    "<<|, assign=True>>)))" + _RENEW,
    "file = io.BytesIO()\ntorch.save((net.state_dict(), optimizer.state_dict()), file)\n"
    "file.seek(0)\n"
    "state, of_optimizer = torch.load(file, map_location=DEVICE)\n"
    "net.load_state_dict(state)\noptimizer.load_state_dict(of_optimizer)",
    "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
    "if not handles and not any(parametrize.is_parametrized(m) for m in net.modules()):\n"
    "    net = <<copy.deepcopy(net)|pickle.loads(pickle.dumps(net))>>" + _RENEW,
    "saved['ema'] = torch.optim.swa_utils.AveragedModel(net<<|, use_buffers=True>>)"
    "\nsaved['ema'].update_parameters(net)\nnote('mean', saved['ema'](batch({k})))",
    "if 'ema' in saved and list(saved['ema'].module.state_dict()) == list(net.state_dict()):\n"
    "    saved['ema'].update_parameters(net)\n    note('mean', saved['ema'](batch({k})))",
    "vector = nn.utils.parameters_to_vector(net.head.parameters())\nnote('vector', vector)\n"
    "nn.utils.vector_to_parameters(vector * 0.9, net.head.parameters())",
    "changed = {n: p * 0.5 for n, p in net.named_parameters()}\n"
    "note('functional', functional_call(net, changed, (batch({k}),), tie_weights=<<True|False>>))",
    "if type(net.first) is nn.Linear and not net.training and not net.first._forward_hooks:\n"
    "    net.first, net.bn = fuse_linear_bn_eval(net.first, net.bn), nn.Identity()" + _RENEW,
    "net.<<double|float>>()" + _RENEW,
    "net.to(<<torch.float32|torch.float64>>)" + _RENEW,
    "net.mean = <<torch.zeros(4, device=DEVICE)|net.mean * 0.5|net.mean.clone()>>",
    "net.kept.<<mul_(1.5)|fill_(0.2)|add_(net.mean)>>",
    "net.kept = net.mean",
    "with torch.no_grad():\n    for p in net.parameters():\n"
    "        p.<<mul_(0.9)|clamp_(-0.5, 0.5)>>",
    "for p in net.parameters():\n    p.data = p.data<< * 0.9|.clone()|.flip(0)>>",
    "note('norm', nn.utils.clip_grad_norm_(net.parameters(), 0.1))",
    "optimizer.add_param_group("
    "{'params': [nn.Parameter(torch.ones(2, device=DEVICE))], 'lr': 0.1})",
    "for group in optimizer.param_groups:\n    group['lr'] *= 0.5",
    "net.forward = <<lambda x: Net.forward(net, x) * 2|net.forward>>",
    "net.blocks[0].forward = (lambda old: lambda x, shift=None: old(x, shift) * 2)"
    "(net.blocks[0].forward)",
    "Block.forward = (lambda old: lambda self, x, shift=None: old(self, x, shift) + 0.1)"
    "(Block.forward)",
    "net.{M}.register_state_dict_post_hook(lambda m, state, prefix, meta: state.update("
    "{prefix + 'more': torch.ones(1)}))",
    "net.blocks[0].__class__ = type('Renamed', (Block,), {'forward': lambda self, x, shift=None: "
    "Block.forward(self, x, shift) * 3})",
    "with torch.no_grad():\n    net.first.weight.copy_(net.head.weight)",
    "net.requires_grad_(False)\nnet.head.requires_grad_(True)" + _RENEW,
    "net.named['u'] = net.named.pop('u')",
    "net.named['<<v|w>>'] = net.<<head|named['u']>>" + _RENEW,
    "net.zero_grad(set_to_none=<<True|False>>)",
    "net.named['u'] = nn.utils.<<spectral_norm|weight_norm>>(nn.Linear(4, 4)).to(DEVICE)" + _RENEW,
    "net.head = nn.Sequential(net.head, nn.<<Dropout(0.0)|Tanh()|LayerNorm(4)>>).to(DEVICE)"
    "\nnet.head.weight = net.head[0].weight" + _RENEW,
)
_OPTIMIZERS = (
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}),
    ("RMSprop", {"lr": 0.01, "eps": 1e-3}),
    ("SGD", {"lr": 0.05}),
)
_Seen = list[tuple[str, Any]]


def script(seed: int) -> str:
    """Return the source of a script: a head, edits, and steps or calls between them."""
    chosen = random.Random(seed)
    lines = [f"OPTIMIZER = {chosen.choice(_OPTIMIZERS)!r}", _HEAD, "step(0)"]
    for number in range(chosen.randint(2, 7)):
        edit = chosen.choice(_EDITS)
        for key, names in (("{L}", _LINEARS), ("{M}", _MODULES)):
            edit = edit.replace(key, chosen.choice(names.split("|")))
        text, _ = varied(edit.replace("{k}", str(number)), chosen)
        lines.append(f"try:\n{textwrap.indent(text, '    ')}\nexcept REFUSED as error:")
        lines.append("    note('raised', type(error).__name__)")
        if chosen.random() < 0.8:
            lines.append(chosen.choice(["step", "step", "call"]) + f"({number + 1})")
    return "\n".join([*lines, "step(20)", "call(21)", "look()"])


def _run(source: str, device: str, path: Path) -> _Seen:
    path.write_text(source)
    module = sys.modules["script"] = types.ModuleType("script")  # where pickle finds its classes
    names = vars(module)
    names["DEVICE"] = device
    names["REFUSED"] = (AttributeError, ValueError, KeyError, IndexError)
    try:
        exec(compile(source, path, "exec"), names)
    finally:
        del sys.modules["script"]
    return [(n, v.detach().cpu() if torch.is_tensor(v) else v) for n, v in names["seen"]]


def _differ(want: Any, have: Any, tolerance: float = 1e-4) -> bool:
    if not (isinstance(want, torch.Tensor) and isinstance(have, torch.Tensor)):
        return want != have
    if want.shape != have.shape or want.dtype != have.dtype:
        return True
    return not torch.allclose(want.double(), have.double(), 10 * tolerance, tolerance)


def verdict(source: str, path: Path) -> tuple[str, str]:
    """Run a script in eager PyTorch and ported."""
    try:
        wanted = _run(source, "cpu", path)
    except Exception as error:
        return "eager raises", f"{type(error).__name__}: {error}".partition("\n")[0][:200]
    try:
        with tpuport.porting():
            found = _run(source, "cuda", path)
    except PortError as error:
        return "refused", str(error)[:600]
    except Exception as error:
        return "differs", f"raises {type(error).__name__}: {error}"
    for (name, want), (other, have) in zip(wanted, found, strict=False):
        if name != other or _differ(want, have):
            return "differs", f"{name}: {want}; port: {other}: {have}"
    if len(wanted) != len(found):
        return "differs", f"{len(wanted)} notes; port: {len(found)}"
    return "passes", ""


def _judged(seed: int, folder: Path) -> Iterator[Found]:
    source = script(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, what = verdict(source, folder / f"script{seed}.py")
        edits = source[source.index("step(0)") :]
        yield Found(kind, what, edits)


if __name__ == "__main__":
    run_seeds(__doc__, _judged)
