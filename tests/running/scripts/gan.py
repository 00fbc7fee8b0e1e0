"""GAN with two optimizers, spectral norm, detach, WGAN clamp and EMA by hand."""
import json

import torch
import torch.nn as nn
from torch.nn.utils import spectral_norm

torch.manual_seed(0)
dev = torch.device("cuda:0")
G = nn.Sequential(nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, 6), nn.Tanh())
D = nn.Sequential(spectral_norm(nn.Linear(6, 16)), nn.LeakyReLU(0.2, inplace=True), nn.utils.parametrizations.spectral_norm(nn.Linear(16, 1)))
C = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
G.to(dev); D.to(dev); C.to(dev)
og = torch.optim.Adam(G.parameters(), lr=1e-2, betas=(0.5, 0.999))
od = torch.optim.Adam(D.parameters(), lr=1e-2, betas=(0.5, 0.999))
oc = torch.optim.RMSprop(C.parameters(), lr=1e-2)
bce = nn.BCEWithLogitsLoss()
z0 = torch.randn(5, 8, 4)
real0 = torch.randn(5, 8, 6)
log = []
for i in range(5):
    real, z = real0[i].to(dev), z0[i].to(dev)
    ones = torch.full((8, 1), 1.0, device=dev); zeros = torch.zeros_like(ones)
    D.zero_grad()
    fake = G(z)
    ld = bce(D(real), ones) + bce(D(fake.detach()), zeros)
    ld.backward()
    od.step()
    C.zero_grad()
    lc = C(fake.detach()).mean() - C(real).mean()
    lc.backward(); oc.step()
    for p in C.parameters():
        p.data.clamp_(-0.1, 0.1)
    for p in D.parameters():
        p.requires_grad = False
    G.zero_grad()
    lg = bce(D(fake), ones) - C(fake).mean()
    lg.backward()
    og.step()
    for p in D.parameters():
        p.requires_grad = True
    log.append([ld.item(), lg.item(), lc.item()])
G.eval()
with torch.no_grad():
    s = G(z)
print(json.dumps({"log": log, "s": s.sum(1).tolist(), "u": D[0].weight_u.tolist(), "w": D[2].weight.abs().sum().item()}))
