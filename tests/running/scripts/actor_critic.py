"""Policy gradients with torch.distributions; the environment is numpy."""
import json
import random
from collections import deque, namedtuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributions import Categorical

torch.manual_seed(0); random.seed(0); np.random.seed(0)
device = torch.device("cuda")
Saved = namedtuple("Saved", ["log_prob", "value"])
class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 16)
        self.action_head, self.value_head = nn.Linear(16, 2), nn.Linear(16, 1)
        self.saved_actions, self.rewards = [], []
    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)
class Env:
    def reset(self):
        self.s = np.array([0.1, -0.2, 0.3, 0.0], dtype=np.float32); self.t = 0
        return self.s
    def step(self, a):
        self.s = (self.s * 0.9 + (a - 0.5) * 0.1).astype(np.float32); self.t += 1
        return self.s, float(self.s.sum()), self.t > 6
model, env = Policy().to(device), Env()
opt = torch.optim.Adam(model.parameters(), lr=3e-2)
log, buffer = [], deque(maxlen=50)
for episode in range(3):
    s, done = env.reset(), False
    while not done:
        state = torch.from_numpy(s).float().to(device)
        probs, value = model(state)
        m = Categorical(probs)
        action = probs.argmax() if episode else torch.tensor(env.t % 2, device=device)
        model.saved_actions.append(Saved(m.log_prob(action), value))
        prev = s
        s, r, done = env.step(action.item())
        buffer.append((prev, action.cpu().numpy(), r, s))
        model.rewards.append(r)
    R, returns = 0, deque()
    for r in model.rewards[::-1]:
        R = r + 0.99 * R
        returns.appendleft(R)
    returns = torch.tensor(list(returns)).to(device)
    returns = (returns - returns.mean()) / (returns.std() + 1e-6)
    pl, vl = [], []
    for (lp, v), R in zip(model.saved_actions, returns):
        pl.append(-lp * (R - v.item())); vl.append(F.smooth_l1_loss(v, R.unsqueeze(0)))
    opt.zero_grad()
    loss = torch.stack(pl).sum() + torch.stack(vl).sum()
    loss.backward(); opt.step()
    log.append(loss.item())
    del model.rewards[:]; del model.saved_actions[:]
target = Policy().to(device)
target.load_state_dict(model.state_dict())
batch = random.sample(list(buffer), 8)
ss = torch.as_tensor(np.stack([b[0] for b in batch]), device=device)
q = model(ss)[0].gather(1, torch.as_tensor(np.stack([b[1] for b in batch]), device=device).long().unsqueeze(1))
with torch.no_grad():
    nxt = target(torch.as_tensor(np.stack([b[3] for b in batch]), device=device))[0].max(1)[0]
loss = F.mse_loss(q.squeeze(1), nxt); loss.backward()
for tp, p in zip(target.parameters(), model.parameters()):
    tp.data.mul_(0.5).add_(0.5 * p.data)
print(json.dumps({"log": log, "dqn": loss.item(), "t": target(ss)[1].sum().item(), "buf": [float(b[1]) for b in batch]}))
