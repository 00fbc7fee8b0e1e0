"""diffusers: an UNet, a VAE by its methods, a scheduler loop, classifier-free guidance."""
import json

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel

torch.manual_seed(0)
device = "cuda"
unet = UNet2DConditionModel(sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=8, attention_head_dim=2)
vae = AutoencoderKL(block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4, norm_num_groups=4, sample_size=16)
unet.to(device); vae.to(device)
vae.requires_grad_(False)
noise_scheduler = DDIMScheduler(num_train_timesteps=100, clip_sample=False)
opt = torch.optim.AdamW(unet.parameters(), lr=1e-3)
pixels = torch.linspace(-1, 1, 2 * 3 * 16 * 16).reshape(2, 3, 16, 16).to(device)
text = torch.linspace(-1, 1, 2 * 5 * 8).reshape(2, 5, 8).to(device)
losses = []
unet.enable_gradient_checkpointing()
unet.train()
for step in range(2):
    with torch.no_grad():
        latents = vae.encode(pixels).latent_dist.mode() * vae.config.scaling_factor
    torch.manual_seed(step)
    noise = torch.randn(latents.shape).to(device)
    t = torch.tensor([10, 70], device=device)
    noisy = noise_scheduler.add_noise(latents, noise, t)
    pred = unet(noisy, t, encoder_hidden_states=text).sample
    loss = torch.nn.functional.mse_loss(pred.float(), noise.float())
    loss.backward(); opt.step(); opt.zero_grad()
    losses.append(loss.item())
unet.eval()
noise_scheduler.set_timesteps(4, device=device)
latents = torch.randn((1, 4, 8, 8), generator=torch.Generator("cpu").manual_seed(0)).to(device) * noise_scheduler.init_noise_sigma
embeds = torch.cat([torch.zeros_like(text[:1]), text[:1]])
with torch.no_grad():
    for t in noise_scheduler.timesteps:
        inp = noise_scheduler.scale_model_input(torch.cat([latents] * 2), t)
        u, c = unet(inp, t, encoder_hidden_states=embeds, return_dict=False)[0].chunk(2)
        latents = noise_scheduler.step(u + 3.0 * (c - u), t, latents).prev_sample
    image = vae.decode(latents / vae.config.scaling_factor).sample
    image = (image / 2 + 0.5).clamp(0, 1).cpu().permute(0, 2, 3, 1).float().numpy()
print(json.dumps({"losses": losses, "latents": latents.flatten()[:8].tolist(), "image": [float(image.mean()), float(image.std())]}))
