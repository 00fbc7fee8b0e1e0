"""Data loading, DataParallel, events, prints in forward, aliases, exceptions, exit codes."""
import argparse
import json
import logging
import threading

import numpy as np
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

logger = logging.getLogger(__name__)
class Data(Dataset):
    def __len__(self): return 12
    def __getitem__(self, i):
        return {"x": torch.full((6,), float(i)), "y": i % 3, "name": f"item{i}"}
def init(worker_id):
    np.random.seed(worker_id)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(6), persistent=False)
        self.freqs = torch.arange(6) * 0.1
        self.step = 0
    def forward(self, x, verbose=False):
        self.step += 1
        if self.freqs.device != x.device:
            self.freqs = self.freqs.to(x.device)
        if verbose:
            print("forward", x.shape, self.step)
        h = checkpoint(self.a, x - self.mean + self.freqs, use_reentrant=False)
        return self.b(h.relu())
def main():
    torch.manual_seed(0)
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda"); parser.add_argument("--workers", type=int, default=0)
    args, _ = parser.parse_known_args()
    device = torch.device(args.device)
    net = Net().to(device)
    model = nn.DataParallel(net)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = DataLoader(Data(), batch_size=4, shuffle=False, num_workers=args.workers, worker_init_fn=init, pin_memory=True)
    log, scaler = [], torch.amp.GradScaler(device.type, enabled=False)
    for epoch in range(2):
        for batch in loader:
            x, y = batch["x"].to(device, non_blocking=True), batch["y"].to(device)
            net.mean.lerp_(x.mean(0), 0.1)
            loss = nn.functional.cross_entropy(model(x, verbose=epoch == 1), y)
            opt.zero_grad(set_to_none=False)
            scaler.scale(loss).backward()
            scaler.step(opt); scaler.update()
            log.append(loss.item())
    for s in opt.state.values():
        s["exp_avg"].zero_()
    opt.param_groups[0]["lr"] *= 0.1
    results = {}
    def evaluate(name):
        with torch.no_grad():
            results[name] = model(x).sum().item()
    threads = [threading.Thread(target=evaluate, args=(f"t{i}",)) for i in range(3)]
    [t.start() for t in threads]; [t.join() for t in threads]
    host = net.cpu()
    results["cpu"] = host(x.cpu()).sum().item()
    net.to(device)
    results["steps"] = net.step
    results["ptr"] = net.a.weight.data_ptr() == next(net.parameters()).data_ptr()
    results["module"] = list(model.state_dict())[0]
    print(json.dumps({"log": log, **{k: results[k] for k in sorted(results)}}))
if __name__ == "__main__":
    main()
