"""What each of several replicas gets from torch_xla's collectives; written to a file of its own."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch_xla.core.functions as xf
import torch_xla.core.xla_model as xm
import torch_xla.distributed.xla_backend  # noqa: F401  (registers the backend)
import torch_xla.distributed.xla_multiprocessing as xmp
import torch_xla.runtime as xr
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch_xla.distributed.fsdp import XlaFullyShardedDataParallel


def collectives(rank, size, device):
    x = torch.arange(4.0, device=device).view(2, 2) + 10 * rank
    held = [x.clone(), torch.ones(3, device=device, dtype=torch.bfloat16) * (rank + 1)]
    xm.all_reduce("sum", held, scale=0.5)
    root = [x.clone()]
    xm.collective_broadcast(root, root_ordinal=1)
    leaf = x.clone().requires_grad_()
    (xf.all_gather(leaf).pow(2).sum() + xf.all_reduce("max", leaf).sum()).backward()
    turns = []
    xmp.MpSerialExecutor().run(lambda: turns.append(rank))
    return {
        "sum": xm.all_reduce(xm.REDUCE_SUM, x),
        "or": xm.all_reduce("or", torch.tensor([rank == 0, False], device=device)),
        "scaled": held,
        "gathered": xm.all_gather(x, dim=-1),
        "own": xm.all_gather(x, groups=[[one] for one in range(size)]),
        "scattered": xm.reduce_scatter("sum", x, 0.5, 0, size),
        "to_all": xm.all_to_all(x, 0, 1, size),
        "turned": xm.collective_permute(x, [[one, (one + 1) % size] for one in range(size)]),
        "zeros": xm.collective_permute(x, [[0, 1]]),
        "root": root[0],
        "grad": leaf.grad,
        "mesh": xm.mesh_reduce("tag", {"a": rank}, lambda all_of: all_of),
        "payloads": xm.rendezvous("tag", bytes([rank]) * rank),
        "only": xm.do_on_ordinals(lambda one: one.device.type, (x,), ordinals=(1,)),
        "device": str(xm.all_gather(x).device),
        "turns": turns,
        "numbers": (xr.global_ordinal(), xr.world_size(), xm.get_ordinal(), xm.is_master_ordinal()),
    }


def training(rank, size, device):
    """Train with a part of each batch, on each replica from other weights."""
    found = {}
    for way in ("xm", "ddp"):
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
        if way == "xm":
            xm.broadcast_master_param(model)
        else:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = []
        for step in range(3):
            batch = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = model(batch[rank::size].to(device)).pow(2).mean()
            loss.backward()
            xm.optimizer_step(optimizer) if way == "xm" else optimizer.step()
            losses.append(xm.mesh_reduce("loss", loss.item(), lambda all_of: sum(all_of) / size))
        found[way] = losses
    return found


def accumulation(rank, size, device):
    """Train with DDP, two parts of a batch a step, the first without a sync, and with buffers."""
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(device)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    found = []
    for step in torch.randn(2, 2, 16, 3, generator=torch.Generator().manual_seed(0)):
        first, second = (half[rank::size].to(device) for half in step)
        optimizer.zero_grad()
        with ddp.no_sync():
            ddp(first).pow(3).mean().backward()
        found.append(model[0].weight.grad.clone())
        ddp(second).pow(3).mean().backward()
        found.append(model[0].weight.grad.clone())
        optimizer.step()
    return found, model.state_dict()


def group(rank, size, device):
    x = torch.arange(2.0, device=device) + rank
    dist.all_reduce(x)
    parts = [torch.zeros(2, device=device) for _ in range(size)]
    dist.all_gather(parts, x * (rank + 1))
    names = [None] * size
    dist.all_gather_object(names, f"replica {rank}")
    return {"sum": x, "parts": parts, "names": names, "backend": dist.get_backend()}


def wrong(rank, device):
    """Return what each wrong call raises."""
    x = torch.ones(2 + rank, device=device)
    calls = {
        "group": lambda: xm.all_reduce("sum", x, groups=[[0], [1, 2]]),
        "parts": lambda: xm.all_to_all(torch.ones(2, device=device), 0, 0, 4),
        "divides": lambda: xm.reduce_scatter("sum", torch.ones(3, device=device), 1.0, 0, 2),
        "shapes": lambda: xm.all_gather(x),
        "order": lambda: xm.mesh_reduce("a", 1, sum) if rank else xm.all_gather(x),
        "spmd": xr.use_spmd,
        "number": lambda: xmp.spawn(print, nprocs=8),
        "fsdp": lambda: XlaFullyShardedDataParallel(nn.Linear(2, 2)),
        "some": lambda: xm.xla_rendezvous(b"", ordinals=[0]),
    }
    raised = {}
    for name, call in calls.items():
        try:
            call()
            raised[name] = "nothing"
        except Exception as error:
            raised[name] = f"{type(error).__name__} {error}".replace("\n", " ")
    return raised


def main(rank, folder):
    dist.init_process_group("xla", init_method="xla://")
    device, size = xm.xla_device(), xr.world_size()
    found = {
        "accumulation": accumulation(rank, size, device),
        "collectives": collectives(rank, size, device),
        "training": training(rank, size, device),
        "group": group(rank, size, device),
        "wrong": wrong(rank, device),
    }
    xm.save(found, folder / f"{rank}.pt", master_only=False)
    xm.save(rank, folder / "master.pt")
    xm.master_print("the master prints")
    dist.destroy_process_group()


if __name__ == "__main__":
    xmp.spawn(main, args=(Path(sys.argv[1]),))
