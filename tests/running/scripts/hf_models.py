"""transformers: training loops without a Trainer, generate, checkpointing, LoRA by hand."""
import json
import sys

import torch
import torch.nn as nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    get_cosine_schedule_with_warmup,
)

torch.manual_seed(0)
device = "cuda"
out = {}
ids = (torch.arange(24) * 7 % 29).reshape(2, 12)
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=31)
class LoRA(nn.Module):
    def __init__(self, base, r=2, alpha=4):
        super().__init__()
        self.base = base
        self.lora_a = nn.Parameter(torch.randn(r, base.in_features) * 0.1)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, r))
        self.scaling = alpha / r
        self.merged = False
    def forward(self, x):
        y = self.base(x)
        return y if self.merged else y + (x @ self.lora_a.T @ self.lora_b.T) * self.scaling
model = LlamaForCausalLM(config).to(device)
model.eval()
batch = {"input_ids": ids.to(device), "attention_mask": torch.ones_like(ids).to(device), "labels": ids.to(device)}
with torch.no_grad():
    out["base"] = model(**batch).loss.item()
for p in model.parameters():
    p.requires_grad = False
for name, module in list(model.named_modules()):
    if name.endswith(("q_proj", "v_proj")):
        parent = model.get_submodule(name.rsplit(".", 1)[0])
        torch.manual_seed(len(name))
        setattr(parent, name.rsplit(".", 1)[1], LoRA(module).to(device))
model.gradient_checkpointing_enable()
model.enable_input_require_grads()
model.config.use_cache = False
model.train()
trainable = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.AdamW(trainable, lr=1e-2)
sched = get_cosine_schedule_with_warmup(opt, 2, 6)
losses = []
for step in range(4):
    loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trainable, 1.0)
    opt.step(); sched.step(); opt.zero_grad()
    losses.append(loss.item())
out["lora"] = losses
model.gradient_checkpointing_disable()
model.eval()
for m in model.modules():
    if isinstance(m, LoRA):
        m.base.weight.data += m.lora_b @ m.lora_a * m.scaling
        m.merged = True
with torch.no_grad():
    out["merged"] = model(**batch).loss.item()
model.config.use_cache = True
out["greedy"] = model.generate(ids[:, :5].to(device), max_new_tokens=4, do_sample=False).tolist()
if "--long" in sys.argv:
    out["static"] = model.generate(ids[:, :5].to(device), max_new_tokens=6, do_sample=False, cache_implementation="static").tolist()
    out["beams"] = model.generate(ids[:, :5].to(device), max_new_tokens=4, num_beams=2, do_sample=False).tolist()
torch.manual_seed(0)
gpt = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)).to(device)
assert gpt.lm_head.weight is gpt.transformer.wte.weight
torch.manual_seed(1)
gpt.resize_token_embeddings(35, mean_resizing=False)
assert gpt.lm_head.weight is gpt.transformer.wte.weight
opt = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
for step in range(3):
    o = gpt(input_ids=batch["input_ids"], labels=batch["labels"], output_hidden_states=True)
    (o.loss + o.hidden_states[0].pow(2).mean()).backward()
    opt.step(); opt.zero_grad()
    out[f"gpt{step}"] = o.loss.item()
with torch.no_grad():
    o = gpt(batch["input_ids"][:, :6], use_cache=True)
    past = o.past_key_values
    tok = o.logits[:, -1:].argmax(-1)
    for _ in range(2):
        o = gpt(tok, past_key_values=past, use_cache=True)
        past, tok = o.past_key_values, o.logits[:, -1:].argmax(-1)
    out["cached"] = o.logits.abs().sum().item()
    out["length"] = past.get_seq_length()
print(json.dumps(out))
