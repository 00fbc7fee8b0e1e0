"""Hidden state carried between calls, packed sequences, weight norm, truncated or not."""
import json

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

torch.manual_seed(0)
class Char(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 6)
        self.rnn = nn.LSTM(6, 8, 2, batch_first=True)
        self.out = nn.Linear(8, 11)
    def init_hidden(self, n):
        w = next(self.parameters())
        return w.new_zeros(2, n, 8), w.new_zeros(2, n, 8)
    def forward(self, x, h):
        y, h = self.rnn(self.emb(x), h)
        return self.out(y), h
class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(6, 5, bidirectional=True, batch_first=True)
    def forward(self, x, lengths):
        p = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, h = self.gru(p)
        y, n = pad_packed_sequence(y, batch_first=True)
        return y.sum(1), h, n
device = "cuda"
net = Char().to(device)
opt = torch.optim.SGD(net.parameters(), lr=0.3)
text = (torch.arange(60) * 5 % 11).reshape(2, 30).to(device)
log = []
h = net.init_hidden(2)
for t in range(0, 25, 5):
    h = tuple(v.detach() for v in h)
    opt.zero_grad()
    logits, h = net(text[:, t:t + 5], h)
    loss = nn.functional.cross_entropy(logits.reshape(-1, 11), text[:, t + 1:t + 6].reshape(-1))
    loss.backward()
    nn.utils.clip_grad_value_(net.parameters(), 0.5)
    opt.step()
    log.append(loss.item())
# through two calls
opt.zero_grad()
l1, h = net(text[:, :5], net.init_hidden(2))
l2, h = net(text[:, 5:10], h)
(l1.pow(2).mean() + l2.pow(2).mean() + h[1].sum()).backward()
grads = [p.grad.norm().item() for p in net.parameters()]
packed = Packed().to(device)
x = torch.linspace(-1, 1, 3 * 7 * 6).reshape(3, 7, 6).to(device).requires_grad_()
y, hn, n = packed(x, torch.tensor([7, 3, 5]))
(y.sum() + hn.pow(2).sum()).backward()
res = {"log": log, "grads": grads, "packed": y.sum(1).tolist(), "n": n.tolist(), "xg": x.grad.abs().sum((0, 2)).tolist()}
net.rnn.flatten_parameters()
with torch.no_grad():
    res["again"] = net(text[:, :3], net.init_hidden(2))[0].sum().item()
cell = nn.GRUCell(6, 8).to(device)
hx = torch.zeros(2, 8, device=device)
for t in range(4):
    hx = cell(net.emb(text[:, t]), hx)
hx.sum().backward()
res["cell"] = [p.grad.norm().item() for p in cell.parameters()]
print(json.dumps(res))
