"""Gradients and values that cross the boundary of a call by attributes, closures and arguments."""
import json
from dataclasses import dataclass

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda"
x = torch.linspace(-1, 1, 12).reshape(2, 6).to(device)
out = {}
SCALE = 1.0

class UsesContext(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.context = None
    def forward(self, x):
        return self.lin(x) + self.context
enc, use = nn.Linear(6, 6).to(device), UsesContext().to(device)
use.context = enc(x)
use(x).pow(2).sum().backward()
out["context"] = [enc.weight.grad.norm().item(), use.lin.weight.grad.norm().item()]
use.context = enc(x * 2)
enc.zero_grad()
use(x).pow(2).sum().backward()
out["context2"] = [enc.weight.grad.norm().item()]

class Glob(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)
    def forward(self, x):
        return self.lin(x) * SCALE
g = Glob().to(device)
vals = []
for s in (1.0, 2.0, 5.0):
    SCALE = s
    vals.append(g(x).sum().item())
out["global"] = vals

class Cfg:
    scale = 1.0
class UsesCfg(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.lin, self.cfg = nn.Linear(6, 6), cfg
    def forward(self, x):
        return self.lin(x) * self.cfg.scale + Cfg.scale
cfg = Cfg(); u = UsesCfg(cfg).to(device); vals = []
for s in (1.0, 2.0, 5.0):
    cfg.scale = s
    vals.append(u(x).sum().item())
    Cfg.scale = s
    vals.append(u(x).sum().item())
out["config"] = vals

class Cache(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.store, self.hits = nn.Linear(6, 6), {}, 0
    def forward(self, x, key):
        if key in self.store:
            self.hits += 1
            return self.store[key]
        y = self.lin(x)
        self.store[key] = y.detach()
        return y
c = Cache().to(device)
out["cache"] = [c(x * i, k).sum().item() for i, k in enumerate("aabacb")] + [c.hits, sorted(c.store)]

@dataclass
class Out:
    loss: torch.Tensor
    n: int
    extra: object = None
class Many(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)
    def forward(self, x, mode):
        y = self.lin(x)
        if mode == "dc":
            return Out(y.sum(), x.shape[0], {"deep": [y, (None, 3.5)]})
        if mode == "alias":
            return x
        if mode == "param":
            return self.lin.weight
        if mode == "view":
            return x[0]
        if mode == "none":
            return None
        if mode == "bad":
            raise ValueError("too bad")
        return len(x), y.shape, "name"
m = Many().to(device)
o = m(x, "dc")
o.extra["deep"][0].sum().backward()
out["dc"] = [o.loss.item(), o.n, o.extra["deep"][1][1], m.lin.weight.grad.sum().item()]
z = x.clone()
a = m(z, "alias"); a.add_(1); out["alias"] = [z.sum().item(), a is z]
p = m(x, "param"); out["param"] = [p is m.lin.weight]
with torch.no_grad():
    p.mul_(2)
out["param"] += [m.lin.weight.sum().item()]
m.zero_grad(); m(x, "param").pow(2).sum().backward(); out["param"] += [m.lin.weight.grad.sum().item()]
z = x.clone(); v = m(z, "view"); v.add_(1); out["view"] = z.sum().item()
out["none"] = [m(x, "none"), str(m(x, "other"))]
try:
    m(x, "bad")
except ValueError as error:
    out["bad"] = str(error)
nl = (x * 2).requires_grad_(); nn_ = nl * 3
m.zero_grad(); m(nn_, "dc").loss.backward(); out["nonleaf"] = nl.grad.sum().item()
gi = torch.autograd.grad(m(nl, "dc").loss, nl)[0]; out["gi"] = gi.sum().item()
y = m(nl, "dc").loss
y.backward(retain_graph=True); y.backward(); out["retain"] = nl.grad.sum().item()

class Appends(nn.Module):
    def __init__(self, sink):
        super().__init__()
        self.lin, self.sink = nn.Linear(6, 6), sink
    def forward(self, x, also):
        y = self.lin(x)
        self.sink.append(y)
        also.append(y * 2)
        return y.detach()
sink, also = [], []
ap = Appends(sink).to(device)
for i in range(3):
    ap(x * i, also)
(sum(s.sum() for s in sink) + also[2].sum()).backward()
out["sink"] = [len(sink), ap.sink is sink, ap.lin.bias.grad.tolist(), len(also), [s.sum().item() for s in sink]]
TRACE = []
class ToGlobal(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(6, 6)
    def forward(self, x):
        y = self.lin(x)
        TRACE.append(y)
        return y.tanh()
tg = ToGlobal().to(device)
for i in range(3):
    tg(x * i)
sum(t.sum() for t in TRACE).backward()
out["trace"] = [len(TRACE), [t.sum().item() for t in TRACE], tg.lin.bias.grad.tolist()]
print(json.dumps(out))
