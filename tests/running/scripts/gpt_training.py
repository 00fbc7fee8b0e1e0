"""In the style of nanoGPT: everything of a single-file training script, resumed once."""
import inspect
import json
import math
import os
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

device, dtype, backend = "cuda", "bfloat16", "nccl"
batch_size, block_size, accumulation, iters = 4, 8, 4, 6
ddp = int(os.environ.get("RANK", -1)) != -1 and torch.cuda.is_available()
if ddp:
    init_process_group(backend=backend)
    local_rank = int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local_rank}"
    torch.cuda.set_device(device)
    assert accumulation % int(os.environ["WORLD_SIZE"]) == 0
torch.manual_seed(1337)
torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
device_type = "cuda" if "cuda" in device else "cpu"
ptdtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
ctx = torch.amp.autocast(device_type=device_type, dtype=ptdtype) if os.environ.get("AMP") else nullcontext()

@dataclass
class Config:
    vocab: int = 17
    n_embd: int = 16
    n_head: int = 2
    n_layer: int = 1
    dropout: float = 0.0

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd)
        self.n_head, self.n_embd, self.dropout = c.n_head, c.n_embd, c.dropout
        self.flash = hasattr(F, "scaled_dot_product_attention")
    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (t.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(c.n_embd), nn.LayerNorm(c.n_embd)
        self.attn = Attention(c)
        self.mlp = nn.Sequential(nn.Linear(c.n_embd, 4 * c.n_embd), nn.GELU(), nn.Linear(4 * c.n_embd, c.n_embd))
    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))

class GPT(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(c.vocab, c.n_embd), wpe=nn.Embedding(block_size, c.n_embd),
            h=nn.ModuleList([Block(c) for _ in range(c.n_layer)]), ln_f=nn.LayerNorm(c.n_embd)))
        self.lm_head = nn.Linear(c.n_embd, c.vocab, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
    def forward(self, idx, targets=None):
        device = idx.device
        b, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=device)
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)
        for block in self.transformer.h:
            x = block(x)
        x = self.transformer.ln_f(x)
        if targets is not None:
            logits = self.lm_head(x)
            return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return self.lm_head(x[:, [-1], :]), None
    def configure_optimizers(self, weight_decay, lr, betas, device_type):
        params = {n: p for n, p in self.named_parameters() if p.requires_grad}
        groups = [{"params": [p for p in params.values() if p.dim() >= 2], "weight_decay": weight_decay},
                  {"params": [p for p in params.values() if p.dim() < 2], "weight_decay": 0.0}]
        fused = "fused" in inspect.signature(torch.optim.AdamW).parameters and device_type != "cpu"
        return torch.optim.AdamW(groups, lr=lr, betas=betas, **(dict(fused=True) if fused else {}))
    @torch.no_grad()
    def generate(self, idx, n):
        for _ in range(n):
            idx_cond = idx if idx.size(1) <= block_size else idx[:, -block_size:]
            logits, _ = self(idx_cond)
            v, _ = torch.topk(logits[:, -1, :], 3)
            logits = logits[:, -1, :]
            logits[logits < v[:, [-1]]] = -float("Inf")
            idx = torch.cat((idx, F.softmax(logits, dim=-1).argmax(-1, keepdim=True)), dim=1)
        return idx

data = (np.arange(400) * 7 % 17).astype(np.uint16)
rng = np.random.default_rng(0)
def get_batch(split):
    ix = rng.integers(0, len(data) - block_size - 1, batch_size)
    x = torch.stack([torch.from_numpy(data[i:i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1:i + 1 + block_size].astype(np.int64)) for i in ix])
    if device_type != "cpu":
        return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
    return x.to(device), y.to(device)

out = tempfile.mkdtemp()
log = []
def run(init_from, start, stop):
    model = GPT(Config())
    best = 1e9
    if init_from == "resume":
        checkpoint = torch.load(os.path.join(out, "ckpt.pt"), map_location=device)
        state_dict = checkpoint["model"]
        for k in list(state_dict):
            if k.startswith("_orig_mod."):
                state_dict[k[len("_orig_mod."):]] = state_dict.pop(k)
        model.load_state_dict(state_dict)
    model.to(device)
    scaler = torch.cuda.amp.GradScaler(enabled=(dtype == "float16"))
    optimizer = model.configure_optimizers(1e-1, 1e-2, (0.9, 0.95), device_type)
    if init_from == "resume":
        optimizer.load_state_dict(checkpoint["optimizer"])
    checkpoint = None
    if device_type != "cpu":
        model = torch.compile(model)
    if ddp:
        model = DDP(model, device_ids=[local_rank])
    raw_model = model.module if ddp else model
    @torch.no_grad()
    def estimate_loss():
        res = {}
        model.eval()
        for split in ["train", "val"]:
            losses = torch.zeros(2)
            for k in range(2):
                X, Y = get_batch(split)
                with ctx:
                    logits, loss = model(X, Y)
                losses[k] = loss.item()
            res[split] = losses.mean()
        model.train()
        return res
    X, Y = get_batch("train")
    for it in range(start, stop):
        lr = 1e-2 * 0.5 * (1.0 + math.cos(math.pi * it / iters))
        for g in optimizer.param_groups:
            g["lr"] = lr
        if it % 2 == 0:
            losses = estimate_loss()
            log.append([losses["train"].item(), losses["val"].item()])
            torch.save({"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "it": it}, os.path.join(out, "ckpt.pt"))
        for micro in range(accumulation):
            if ddp:
                model.require_backward_grad_sync = micro == accumulation - 1
            with ctx:
                logits, loss = model(X, Y)
                loss = loss / accumulation
            X, Y = get_batch("train")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        log.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        log.append(loss.item() * accumulation)
    raw_model.eval()
    return raw_model.generate(torch.zeros((1, block_size - 1), dtype=torch.long, device=device), 5)[0].tolist()
tokens = [run("scratch", 0, 3), run("resume", 2, iters)]
if ddp:
    destroy_process_group()
print(json.dumps({"log": log, "tokens": tokens}))
