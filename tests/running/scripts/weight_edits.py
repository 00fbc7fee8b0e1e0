"""All the ways in which a script changes weights between calls."""
import copy
import json

import torch
import torch.nn as nn
import torch.nn.utils.prune as prune

torch.manual_seed(0)
device = "cuda"
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).to(device)
x = torch.linspace(-1, 1, 18).reshape(3, 6).to(device)
out = []
def see(m=None):
    out.append((m or net)(x).sum(1).tolist())
see()
def grads():
    net.zero_grad()
    net(x).pow(2).sum().backward()
grads()
for p in net.parameters():
    p.grad.data.clamp_(-0.05, 0.05)
    p.data -= 0.5 * p.grad
see()
grads()
with torch.no_grad():
    for p in net.parameters():
        p.copy_(p * 0.9); p.sub_(p.grad * 0.1)
see()
torch._foreach_mul_([p.data for p in net.parameters()], 1.1); see()
torch._foreach_add_(list(p.data for p in net.parameters()), [p.grad for p in net.parameters()], alpha=-0.1); see()
net[0].weight.data[0].zero_(); see()
net[0].weight.data[:, 1:3].normal_(0, 0.0).add_(0.3); see()
net[2].weight.detach()[1] = 0.25; see()
w = net[2].weight.detach().view(-1); w[3:9] += 1; see()
rows = net[0].weight.data.unbind(0); rows[2].fill_(0.5); see()
torch.mul(net[0].bias.data, 3, out=net[0].bias.data); see()
net[0].weight.data.storage()[5] = 2.0; see()
net[0].weight.data.untyped_storage().copy_(net[0].weight.data.mul(2).untyped_storage()); see()
flat = torch.cat([p.data.reshape(-1) for p in net.parameters()])
o = 0
for p in net.parameters():
    p.data = flat[o:o + p.numel()].view_as(p); o += p.numel()
see()
flat.mul_(0.5); see()
flat[:10] = 1.0; see()
net[0].weight.data, net[2].weight.data = net[2].weight.data.T.contiguous(), net[0].weight.data.T.contiguous(); see()
net[2].weight = nn.Parameter(net[0].weight.detach().T.contiguous()); see()
prune.l1_unstructured(net[0], "weight", amount=0.5); see()
grads(); out.append(net[0].weight_orig.grad.norm().item())
prune.remove(net[0], "weight"); see()
sd = {k: v.clone() * 0.3 for k, v in net.state_dict().items()}
net.load_state_dict(sd, assign=True); see()
sd["0.weight"].add_(1); see()
net.half(); net.float(); see()
net.cpu(); net.to(device); see()
net.cpu()
with torch.no_grad(): net[0].bias.add_(1)
net.to(device); see()
net.double(); out.append(net(x.double()).sum(1).tolist()); out.append(str(net(x.double()).dtype)); net.float(); see()
net.bfloat16(); out.append(str(net(x.bfloat16()).dtype)); net.float()
torch.utils.swap_tensors(net[0].bias, nn.Parameter(torch.ones(8).to(device))); see()
b = net[0].bias; b.data = b.data.clone(); b.data.resize_(8); see()
lin = net[2]; net[2] = nn.Identity(); out.append(list(net(x).shape)); net[2] = lin; see()
net.append(nn.Linear(6, 2).to(device)); out.append(list(net(x).shape)); del net[3]; see()
for m in net.modules():
    if isinstance(m, nn.Linear):
        nn.init.constant_(m.bias, 0.1); nn.init.orthogonal_(m.weight); m.weight.data.copy_(torch.full_like(m.weight, 0.2))
see()
a = copy.deepcopy(net); a[0].weight.data.mul_(3); see(); see(a)
print(json.dumps(out))
