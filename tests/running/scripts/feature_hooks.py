"""Activations and gradients caught by hooks, outside the modules."""
import json

import torch
import torch.nn as nn

torch.manual_seed(0)
device = "cuda"
net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
x = torch.linspace(-1, 1, 30).reshape(5, 6).to(device)
out = {}
plain = net(x)
features, grads, order = {}, {}, []
def save(name):
    def hook(module, args, output):
        features[name] = output
        order.append(name)
    return hook
handles = [net[i].register_forward_hook(save(f"l{i}")) for i in (0, 2)]
net[2].register_full_backward_hook(lambda m, gi, go: grads.__setitem__("in", gi[0].detach().clone()))
for step in range(3):
    net.zero_grad()
    y = net(x * (step + 1))
    loss = y.pow(2).mean() + features["l0"].abs().mean() + features["l2"].pow(2).sum()
    loss.backward()
    out[f"loss{step}"] = loss.item()
    out[f"g{step}"] = [p.grad.norm().item() for p in net.parameters()]
    out[f"f{step}"] = [features[k].sum().item() for k in sorted(features)]
    out[f"b{step}"] = grads["in"].norm().item()
out["order"] = order
for h in handles:
    h.remove()
features.clear()
net(x)
out["left"] = list(features)
# Grad-CAM: a tensor hook on a stored activation, and retain_grad
acts = []
h = net[2].register_forward_hook(lambda m, i, o: acts.append(o))
y = net(x)
acts[-1].retain_grad()
tg = []
acts[-1].register_hook(lambda g: tg.append(g.sum().item()))
y[:, 1].sum().backward()
out["cam"] = (acts[-1].grad * acts[-1]).sum(1).tolist()
out["tg"] = tg
# gradients scaled by parameter hooks
net.zero_grad()
net[0].weight.register_hook(lambda g: g * 0.5)
net(x).sum().backward()
out["half"] = net[0].weight.grad.norm().item()
# pre hook with kwargs
net[4].register_forward_pre_hook(lambda m, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
out["pre"] = net(x).sum().item()
# hook that steers with a value of the outside
strength = {"v": 1.0}
net[0].register_forward_hook(lambda m, a, o: o + strength["v"])
steered = []
for v in (0.0, 1.0, 5.0, 5.0):
    strength["v"] = v
    steered.append(net(x).sum().item())
out["steered"] = steered
print(json.dumps(out))
