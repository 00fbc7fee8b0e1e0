"""Double backward: refused, or right."""
import json

import torch
import torch.nn as nn

torch.manual_seed(0)
D = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).cuda()
opt = torch.optim.Adam(D.parameters(), lr=1e-2)
data = torch.linspace(-1, 1, 3 * 5 * 4).reshape(3, 5, 4)
log = []
for i in range(3):
    x = data[i].cuda().requires_grad_(True)
    d = D(x)
    g = torch.autograd.grad(outputs=d, inputs=x, grad_outputs=torch.ones(d.size(), device=x.device), create_graph=True, retain_graph=True, only_inputs=True)[0]
    gp = ((g.norm(2, dim=1) - 1) ** 2).mean() * 10
    opt.zero_grad()
    (d.mean() + gp).backward()
    opt.step()
    log.append([gp.item(), d.mean().item()] + [p.grad.norm().item() for p in D.parameters()])
print(json.dumps(log))
