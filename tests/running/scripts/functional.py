"""torch.func on modules: functional_call, grad, vmap, jacrev, ensembles; parametrizations."""
import copy
import json

import torch
import torch.nn as nn
import torch.nn.utils.parametrize as P
from torch.func import functional_call, grad, grad_and_value, jacrev, stack_module_state, vmap

torch.manual_seed(0)
device = "cuda"
net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(device)
x = torch.linspace(-1, 1, 20).reshape(5, 4).to(device)
t = torch.ones(5, 2, device=device)
params = {k: v.detach() for k, v in net.named_parameters()}
out = {}
out["call"] = functional_call(net, {k: v * 2 for k, v in params.items()}, (x,)).sum(1).tolist()
p2 = {k: (v * 2).requires_grad_() for k, v in params.items()}
functional_call(net, p2, (x,)).sum().backward()
out["calls grads"] = [p.grad.norm().item() if p.grad is not None else None for p in p2.values()]
out["none"] = [p.grad is None for p in net.parameters()]
def loss(params, x, t):
    return ((functional_call(net, params, (x,)) - t) ** 2).mean()
g, v = grad_and_value(loss)(params, x, t)
out["grad"] = [v.item()] + [a.norm().item() for a in g.values()]
per = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, t)
out["per"] = [a.flatten(1).norm(dim=1).tolist() for a in per.values()]
out["jac"] = jacrev(lambda x: net(x))(x[0]).tolist()
models = [nn.Linear(4, 3).to(device) for _ in range(3)]
ps, bs = stack_module_state(models)
base = copy.deepcopy(models[0]).to("meta")
out["ens"] = vmap(lambda p, b, x: functional_call(base, (p, b), (x,)), in_dims=(0, 0, None))(ps, bs, x).sum((1, 2)).tolist()
out["vmapnet"] = vmap(net)(x).sum(1).tolist()
class Symmetric(nn.Module):
    def forward(self, X):
        return X.triu() + X.triu(1).transpose(-1, -2)
lin = nn.Linear(4, 4).to(device)
P.register_parametrization(lin, "weight", Symmetric())
lin(x).pow(2).sum().backward()
out["sym"] = lin.parametrizations.weight.original.grad.norm().item()
orth = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)).to(device)
out["orth"] = orth(x).norm().item()
wn = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)).to(device)
old = nn.utils.weight_norm(nn.Linear(4, 3)).to(device)
opt = torch.optim.SGD([*wn.parameters(), *old.parameters()], lr=0.1)
for i in range(3):
    opt.zero_grad(); l = wn(x).pow(2).mean() + old(x).pow(2).mean(); l.backward(); opt.step()
out["wn"] = [l.item(), wn.weight.norm().item(), old.weight_g.norm().item()]
nn.utils.remove_weight_norm(old)
out["removed"] = old(x).sum().item()
with P.cached():
    out["cached"] = wn(x).sum().item()
out["hess"] = torch.autograd.functional.jacobian(net, x[0]).tolist()
print(json.dumps(out))
