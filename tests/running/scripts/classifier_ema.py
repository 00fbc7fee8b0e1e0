"""In the style of timm: EMA, mixup, SyncBatchNorm, channels_last."""
import copy
import json

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(0)
torch.backends.cudnn.benchmark = True
device = torch.device("cuda")

class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.act = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(cin, cout, 1, stride), nn.BatchNorm2d(cout))
    def forward(self, x):
        return self.act(self.bn1(self.conv1(x)) + self.down(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        self.stages = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.head = nn.Linear(16, 5)
    def forward_features(self, x):
        return self.stages(self.stem(x))
    def forward(self, x):
        return self.head(self.forward_features(x).mean((2, 3)))

class ModelEma(nn.Module):
    def __init__(self, model, decay=0.9):
        super().__init__()
        self.module = copy.deepcopy(model)
        self.module.eval()
        self.decay = decay
        for p in self.module.parameters():
            p.requires_grad_(False)
    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values()):
            e.copy_(self.decay * e + (1.0 - self.decay) * m) if e.is_floating_point() else e.copy_(m)
    def forward(self, x):
        return self.module(x)

model = Net()
model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if "cuda" in str(device) else model
model.to(device, memory_format=torch.channels_last)
ema = ModelEma(model)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=6)
data = torch.utils.data.TensorDataset(torch.randn(24, 3, 8, 8), torch.arange(24) % 5)
loader = torch.utils.data.DataLoader(data, batch_size=8, pin_memory=True, drop_last=True)
rng = np.random.default_rng(0)
losses, accs = [], []
for epoch in range(2):
    model.train()
    for images, target in loader:
        images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
        target = target.to(device, non_blocking=True)
        lam = float(rng.beta(0.8, 0.8))
        mixed = images.mul(lam).add_(images.flip(0), alpha=1 - lam)
        y = F.one_hot(target, 5).float() * lam + F.one_hot(target.flip(0), 5).float() * (1 - lam)
        output = model(mixed)
        loss = torch.sum(-y * F.log_softmax(output, dim=-1), dim=-1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        ema.update(model)
        losses.append(loss.item())
    with torch.inference_mode():
        for m in (model, ema.module, ema):
            m.eval()
            accs.append(sum(m(i.to(device)).softmax(-1)[:, 0].sum().item() for i, t in loader))
feats = model.forward_features(images).flatten(1).norm(dim=1)
print(json.dumps({"losses": losses, "accs": accs, "feats": feats.tolist(),
                  "bn": ema.module.stages[1].bn1.running_mean.cpu().numpy().tolist(), "n": int(model.stages[0].bn1.num_batches_tracked)}))
