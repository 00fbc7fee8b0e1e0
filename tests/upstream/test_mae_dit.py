"""Steps of the recipe with MAE-DiT's own classes are those of eager PyTorch with its own losses.

Waits for a checkout: TPUPORT_UPSTREAM_MAE_DIT=/path/to/projectt (tsb0601/projectt at 17a37315), and
for timm, einops, diffusers and transformers 4.46, which its models are written for.
"""

import contextlib
import copy
import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from recipes.mae_dit import dino
from recipes.mae_dit.config import Config, DiscriminatorArch, load
from recipes.mae_dit.discriminator import make_discriminator
from recipes.mae_dit.evaluation import lpips
from recipes.mae_dit.losses import Stage1, active_in, gan_of
from recipes.mae_dit.models import make_autoencoder, make_stage2
from recipes.mae_dit.schedules import make_optimizer, make_schedule
from recipes.mae_dit.stage1 import Stage1Steps
from recipes.mae_dit.stage2.training import Stage2, make_step
from recipes.mae_dit.upstream import checkout, import_module
from tests.recipes.mae_dit.eager import momenta
from tests.upstream.mae_dit_checkout import (
    CHECKOUT,
    CONFIGS,
    needs_checkout,
    stage_1,
    stage_2,
    write_models,
)

pytestmark = needs_checkout
# Upstream embeds times by sines of up to thousands of radians, where float32 has a step of 1e-3: of
# times up to 1000 the weights behind them differ by 3e-4 after three large steps.
TIMES = 20
CHANNELS = (4, 4, 8, 8, 8)  # of a narrow VGG16, in LPIPS of both
MEASURED = os.environ.get("TPUPORT_UPSTREAM_MEASURED")  # a file to add the differences to


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Models in small sizes, with upstream importable."""
    folder = tmp_path_factory.mktemp("mae_dit") / "models"
    write_models(folder)
    with checkout(CHECKOUT):
        yield folder


def theirs(name: str) -> Any:
    return import_module(CHECKOUT, name)


def images(count: int, size: int, seed: int = 1) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "image": torch.rand(count, 3, size, size, generator=g),
        "draws": torch.rand(count, 3, 7, generator=g),
        "label": torch.arange(count, dtype=torch.int32) % 4,
    }


class Distance(nn.Module):
    """A perceptual distance (B,) without VGG16."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x - y).square().mean((1, 2, 3))


def narrow(config: Config, **loss: Any) -> Config:
    """Return a configuration with a narrow discriminator, other losses, and an average."""
    gan = gan_of(config)
    disc = replace(gan.disc, arch=replace(gan.disc.arch, ndf=4, num_layers=2))
    gan = replace(gan, disc=disc, loss=replace(gan.loss, **loss))
    return replace(config, gan=gan, arch=replace(config.arch, ema=0.9))


AUTOENCODERS = {
    "mae/mae.yaml": ("mae", {}, []),
    "mae/mlp_compress/f0.yaml": (
        "mae",
        {},
        ["arch.connector.params.hidden_size=32", "arch.connector.params.layers=1"],
    ),
    "klvae/f_16.yaml": (
        None,
        {
            "embed_dim": 4,
            "ddconfig.z_channels": 4,
            "ddconfig.ch": 32,
            "ddconfig.ch_mult": "[1, 1]",
            "ddconfig.resolution": 32,
            "ddconfig.num_res_blocks": 1,
            "ddconfig.attn_resolutions": "[]",
        },
        [],
    ),
    "fcmae/fcmae_pod128.yaml": (
        None,
        {"model_name": "convnextv2_atto", "pretrained_model_path": "null"},
        [],
    ),
}


@pytest.mark.parametrize("name", AUTOENCODERS)
def test_a_configuration_of_stage_1_takes_a_step(small, name):
    weights, params, others = AUTOENCODERS[name]
    files = {} if weights is None else {"ckpt_path": small / weights}
    config = load(CONFIGS / "stage1" / name, [*stage_1(**files, **params), *others])
    config = narrow(config, disc_start=0, disc_upd_start=0, lpips_start=0, perceptual_weight=1.0)
    judge = make_discriminator(gan_of(config).disc.arch)
    modules = Stage1(make_autoencoder(config, Path(CHECKOUT)), judge, Distance(), gan_of(config))
    step = Stage1Steps(modules, config, 2).of(0)
    batch = images(2, 64 if name.startswith("fcmae") else 32)
    state, metrics = step(step.init(), batch)
    del state
    assert float(metrics["skipped"]) == 0
    assert float(metrics["generator/grad_norm"]) > 0
    assert float(metrics["discriminator/grad_norm"]) > 0


DENOISERS = {
    "klvae/klvaeB2.yaml": ({"ckpt_path": "vae"}, {"input_size": 16, "in_channels": 4}, []),
    "mae/B1_b256_ema.yaml": ({"ckpt_path": "mae"}, {}, ["arch.do_normalize=false"]),
    "mae/SID/B2_b2048_ema.yaml": ({"ckpt_path": "mae"}, {"patch_size": 1}, []),
    "pixel/B2_b256_ema.yaml": ({"hidden_dim": 192, "input_size": 32}, {"in_channels": 192}, []),
}


def stage_2_of(small: Path, name: str, *others: str) -> Config:
    first, second, more = DENOISERS[name]
    first = {n: small / v if n == "ckpt_path" else v for n, v in first.items()}
    overrides = [*stage_1(**first), *stage_2(class_dropout_prob=0.0, **second), *more, *others]
    if name.startswith("mae/"):
        overrides.append("arch.connector.ckpt_path=null")
    return replace(
        config := load(CONFIGS / "stage2" / name, overrides), arch=replace(config.arch, ema=0.9)
    )


def differences(found: Any, wanted: Any) -> float:
    """Return the largest difference of two state dicts, relative to each tensor's largest value."""
    assert found.keys() == wanted.keys()
    worst = 0.0
    for name, value in wanted.items():
        if value.is_floating_point() and value.numel():
            # Gradients that are zero but for rounding make values of about 1e-9.
            scale = value.detach().abs().max().clamp(min=1e-3)
            worst = max(worst, float((found[name] - value).abs().max() / scale))
    return worst


def note(case: str, **found: float) -> None:
    if MEASURED:
        with Path(MEASURED).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"case": case, **found}) + "\n")


@contextlib.contextmanager
def given_numbers(**numbers: Any) -> Iterator[None]:
    """Let `torch.rand`, `randint`, `randn_like` return numbers that the recipe's program has."""

    def rand(*size: Any, **_: Any) -> torch.Tensor:
        if size == (3,):  # whether DiffAug does each of its changes: it does with probability 1
            return torch.zeros(3)
        return numbers["rand"].pop(0)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "rand", rand))
        for name in ("randint", "randn_like"):
            if name in numbers:
                value = numbers[name]
                stack.enter_context(mock.patch.object(torch, name, lambda *_, v=value, **__: v))
        yield


def upstreams_discriminator(ours: nn.Module, arch: DiscriminatorArch) -> Any:
    """Return upstream's own discriminator with the weights of the recipe's."""
    module = theirs("rqvae.losses.vqgan.discriminator")
    if not arch.use_dino:
        made = module.NLayerDiscriminator(3, arch.ndf, arch.num_layers, arch.use_actnorm)
        made.load_state_dict(ours.state_dict())
        return made
    sizes = {
        "depth": SIZE.depth,
        "key_depths": (2, 5, 8, 11),
        "norm_eps": 1e-6,
        "patch_size": SIZE.patch,
        "in_chans": 3,
        "embed_dim": SIZE.width,
        "num_heads": SIZE.heads,
        "mlp_ratio": 4.0,
    }
    dinodisc = theirs("rqvae.losses.vqgan.dinodisc")
    with (
        mock.patch.dict(dinodisc.recipes, small=sizes),
        mock.patch.object(dinodisc, "RandomCrop"),  # of torchvision; it is never called
    ):
        made = module.DinoDiscriminator(
            device="cpu", dino_ckpt_path=arch.dino_ckpt_path, ks=arch.ks, recipe="small"
        )
    heads = {n: v for n, v in ours.state_dict().items() if not n.startswith("dino.")}
    made.load_state_dict(heads)
    return made


def gradients_of(module: nn.Module, prefix: str) -> dict[str, torch.Tensor]:
    found = {f"{prefix}{n}": p.grad for n, p in module.named_parameters()}
    return {n: v.clone() for n, v in found.items() if v is not None}


class EagerStage1:
    """Upstream's modules and losses in eager PyTorch, in the order that the recipe documents."""

    def __init__(self, modules: Stage1, config: Config) -> None:
        interfaces, vqgan = theirs("rqvae.models.interfaces"), theirs("rqvae.losses.vqgan.gan_loss")
        self.config, gan = config, gan_of(config)
        self.gan = gan
        own: Any = copy.deepcopy(modules.model)
        self.model = interfaces.Stage1ModelWrapper(own.stage_1_model, own.connector)
        self.judge = upstreams_discriminator(modules.discriminator, gan.disc.arch)
        self.gradients: dict[str, torch.Tensor] = {}
        self.perceptual = self._lpips(modules.perceptual)
        self.augment = theirs("rqvae.losses.vqgan.diffaug").DiffAug()
        self.disc_loss = getattr(vqgan, f"{gan.loss.disc_loss}_d_loss")
        self.gen_loss = vqgan.vanilla_g_loss
        trainer = theirs("rqvae.trainers.trainer_stage1")
        self.weight = trainer.calculate_adaptive_weight
        averages = theirs("rqvae.models.ema").ExponentialMovingAverage
        self.ema = averages(copy.deepcopy(self.model), config.arch.ema)
        assert gan.disc.optimizer is not None
        self.optimizer = make_optimizer(self.model.parameters(), config.optimizer)
        self.schedule = make_schedule(self.optimizer, config.optimizer, 2, 3)
        self.disc_optimizer = make_optimizer(self.judge.parameters(), gan.disc.optimizer)
        left = 3 - gan.loss.disc_start
        self.disc_schedule = make_schedule(self.disc_optimizer, gan.disc.optimizer, 2, left)

    def _lpips(self, ours: nn.Module) -> nn.Module:
        """Return upstream's LPIPS with the recipe's weights, without torchvision's files."""
        module = theirs("rqvae.losses.vqgan.lpips")
        slices = [list(ours.get_submodule(f"net.slice{i}").children()) for i in range(1, 6)]
        layers = nn.Sequential(*[layer for one in slices for layer in one])
        network = SimpleNamespace(vgg16=lambda pretrained: SimpleNamespace(features=layers))
        with (
            mock.patch.object(module, "models", network),
            mock.patch.object(module.LPIPS, "load_from_pretrained"),
        ):
            made = module.LPIPS().eval()
        for number, channels in enumerate(CHANNELS):
            made.add_module(f"lin{number}", module.NetLinLayer(channels, use_dropout=True))
        made.eval()
        heads = {n: v for n, v in ours.state_dict().items() if n.startswith("lin")}
        made.load_state_dict(heads, strict=False)
        return made

    def parts(self, batch: dict[str, torch.Tensor]) -> list[Any]:
        data = theirs("rqvae.img_datasets.interfaces").LabeledImageData
        count = self.config.experiment.accu_step
        cuts = zip(batch["image"].chunk(count), batch["draws"].chunk(count), strict=True)
        return [(data(img=x), draws.permute(1, 2, 0)[..., None, None]) for x, draws in cuts]

    def step(self, batch: dict[str, torch.Tensor], epoch: int) -> dict[str, float]:
        active, loss = active_in(self.gan, epoch), self.gan.loss
        parts, found = self.parts(batch), []
        for inputs, draws in parts:
            found.append(self._generator(inputs, draws, active, len(parts)))
        clip = self.config.optimizer.clip_grad_norm
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), clip or float("inf")))
        self.gradients = gradients_of(self.model, "model.")
        self.optimizer.step()
        self.schedule.step()
        self.model.zero_grad()
        self.ema.update(self.model)
        metrics = {n: sum(one[n] for one in found) / len(found) for n in found[0]}
        metrics["grad_norm"] = norm
        if active.discriminator:
            self._told_apart(parts, loss.disc_weight, metrics)
        return metrics

    def _generator(self, inputs: Any, draws: Any, active: Any, parts: int) -> dict[str, float]:
        loss, zero = self.gan.loss, torch.zeros(())
        self.judge.eval()
        output = self.model(inputs)
        own = self.model.compute_loss(output, inputs)
        seen = self.perceptual(inputs.img, output.xs_recon) if active.perceptual else zero
        fooled, weight = zero, zero
        if active.adversarial:
            with given_numbers(rand=[draws[0]]):
                fake = self.augment.aug(output.xs_recon * 2 - 1)
            fooled = self.gen_loss(self.judge(fake, None)[0])
            likelihood = own["loss_recon"] + loss.perceptual_weight * seen
            weight = self.weight(likelihood, fooled, self.model.get_last_layer())
        total = own["loss_total"] + loss.perceptual_weight * seen
        total = total + weight * loss.disc_weight * fooled
        (total / parts).backward()
        self.judge.zero_grad()
        return {
            "loss": float(total),
            "recon": float(own["loss_recon"]),
            "perceptual": float(seen),
            "adversarial": float(fooled),
            "weight_of_it": float(weight),
        }

    def _told_apart(self, parts: list[Any], weight: float, metrics: dict[str, float]) -> None:
        self.model.eval()
        self.judge.train()
        losses = []
        for inputs, draws in parts:
            with torch.no_grad():
                made = (self.model(inputs).xs_recon * 2 - 1).clamp(-1, 1)
                made = torch.round((made + 1) / 2 * 255) / 255 * 2 - 1
                with given_numbers(rand=[draws[1], draws[2]]):
                    true = self.augment.aug(inputs.img * 2 - 1)
                    fake = self.augment.aug(made)
            told = self.disc_loss(*reversed(self.judge(fake, true))) * weight
            (told / len(parts)).backward()
            losses.append(float(told))
        self.model.train()
        grads = [p.grad.norm() for p in self.judge.parameters() if p.grad is not None]
        metrics["disc_grad_norm"] = float(torch.stack(grads).norm())
        self.gradients |= gradients_of(self.judge, "discriminator.")
        self.disc_optimizer.step()
        self.disc_schedule.step()
        self.judge.zero_grad()
        metrics["disc_loss"] = sum(losses) / len(losses)


NAMES = ("loss", "recon", "perceptual", "adversarial", "weight_of_it", "grad_norm")
SIZE = dino.Size(patch=56, width=16, heads=2, depth=6)  # of a DINO: three heads
JUDGES = {"patches": [], "actnorm": ["use_actnorm=true"], "dino": ["use_dino=true", "ks=3"]}


# Of biases before instance norms, which subtract them: rounding is all that they have.
NO_GRADIENT = {"patches": ["discriminator.model.2.bias", "discriminator.model.5.bias"]}
NO_GRADIENT |= {"actnorm": [], "dino": []}


def stage_1_of(small: Path, kind: str, parts: int) -> tuple[Stage1, Config]:
    """Return the modules of upstream's MAE, with a discriminator, and their configuration."""
    overrides = stage_1(ckpt_path=small / "mae")
    overrides += [f"experiment.accu_step={parts}", "optimizer.clip_grad_norm=0.5"]
    # Adam makes rounding large in gradients that are zero, as those of biases before norms are.
    overrides += ["gan.disc.optimizer.type=sgd", "optimizer.type=sgd", "optimizer.init_lr=0.02"]
    overrides += ["optimizer.warmup.start_from_zero=false", "optimizer.warmup.epoch=1"]
    overrides += ["gan.disc.optimizer.warmup.start_from_zero=false"]
    overrides += ["optimizer.weight_decay=0", "gan.disc.optimizer.weight_decay=0"]
    overrides += [f"gan.disc.arch.{one}" for one in JUDGES[kind]]
    if kind == "dino":
        weights = dino.DinoDiscriminator(SIZE).dino.state_dict()
        torch.save(weights, small / "dino.pth")
        overrides.append(f"gan.disc.arch.dino_ckpt_path={small / 'dino.pth'}")
    config = load(CONFIGS / "stage1" / "mae" / "mae.yaml", overrides)
    config = narrow(config, disc_start=2, disc_upd_start=1, lpips_start=0, perceptual_weight=1.0)
    config = replace(config, experiment=replace(config.experiment, epochs=3))
    autoencoder = make_autoencoder(config, Path(CHECKOUT))
    autoencoder.stage_1_model.model.vit.requires_grad_(True)  # upstream's train_encoder
    autoencoder.stage_1_model.model.vit.embeddings.position_embeddings.requires_grad_(False)
    with mock.patch.dict(dino.SIZES, S_16=SIZE):
        judge = make_discriminator(gan_of(config).disc.arch)
    with mock.patch.object(lpips, "_CHANNELS", CHANNELS):
        perceptual = lpips.LPIPS()
    return Stage1(autoencoder, judge, perceptual, gan_of(config)), config


@pytest.mark.parametrize(
    ("kind", "parts"), [("patches", 1), ("patches", 4), ("actnorm", 4), ("dino", 1)]
)
def test_stage_1_is_upstreams(small, kind, parts):
    """A step before the discriminator, one that trains it, two with its opinion.

    In one part there are sixteen steps more, whose losses stay within 1e-3.
    """
    with contextlib.ExitStack() as stack:
        if kind != "patches" or parts == 1:
            # Reconstructions are rounded to 8 bits for the discriminator. Of one that is nearly
            # between two of them each side takes another, which changes gradients by a thousandth.
            stack.enter_context(mock.patch.object(torch, "round", lambda x: x))
        off = stage_1_off(small, kind, parts)
    note(f"stage 1, {kind}, accumulation {parts}", **off)
    assert off.pop("losses of 20") < 1e-3
    assert max(off.values()) < 1e-4, off


def stage_1_off(small: Path, kind: str, parts: int) -> dict[str, float]:
    """Return how far steps are from upstream's."""
    modules, config = stage_1_of(small, kind, parts)
    eager, steps = EagerStage1(modules, config), Stage1Steps(modules, config, 2)
    state, before = steps.of(0).init(), {}
    off = {"numbers": 0.0, "gradients": 0.0, "losses of 20": 0.0}
    epochs = (0, 1, 2, 2) + (2,) * (16 if parts == 1 else 0)
    for number, epoch in enumerate(epochs):
        batch = images(4, 32, seed=number)
        del batch["label"]
        wanted = eager.step(batch, epoch)
        state, metrics = steps.of(epoch)(state, batch)
        got = {name: float(metrics[f"generator/{name}"]) for name in NAMES}
        if "disc_loss" in wanted:
            got["disc_loss"] = float(metrics["discriminator/loss"])
            got["disc_grad_norm"] = float(metrics["discriminator/grad_norm"])
        assert got.keys() == wanted.keys()
        apart = {n: abs(got[n] - w) / max(abs(w), 1e-2) for n, w in wanted.items()}
        if number < 4:
            off["numbers"] = max(off["numbers"], *apart.values())
            after = momenta(state)
            found = {n: after[n] - 0.9 * before[n] if before else after[n] for n in eager.gradients}
            for name in NO_GRADIENT[kind]:
                for gradients in (found, eager.gradients):
                    assert float(gradients.pop(name, torch.zeros(1)).abs().max()) < 1e-5, name
            off["gradients"] = max(off["gradients"], differences(found, eager.gradients))
            before = after
        losses = [v for n, v in apart.items() if n in ("loss", "disc_loss")]
        off["losses of 20"] = max(off["losses of 20"], *losses)
        if number == 3:
            off |= compared(steps, state, eager)
    return off


def compared(steps: Stage1Steps, state: Any, eager: EagerStage1) -> dict[str, float]:
    """Return how far weights, buffers and averages are from upstream's."""
    trained: Any = steps.of(2).load_state(state).to_torch()
    averaged: Any = steps.of(2).load_state(state, ema=True).to_torch()
    judge = trained.discriminator.state_dict()
    judge = {n: v for n, v in judge.items() if not n.startswith("dino.")}
    for name, value in eager.judge.state_dict().items():
        assert value.is_floating_point() or torch.equal(judge[name], value), name
    return {
        "weights": differences(trained.model.state_dict(), eager.model.state_dict()),
        "discriminator": differences(judge, eager.judge.state_dict()),
        "averages": differences(averaged.model.state_dict(), eager.ema.module.state_dict()),
    }


@pytest.mark.parametrize("name", DENOISERS)
def test_stage_2_is_upstreams(small, name):
    """Three steps of its own loss, with the times and noise that are drawn given to both."""
    others = ["optimizer.clip_grad_norm=0.5", "optimizer.warmup.start_from_zero=false"]
    config = stage_2_of(small, name, *others, "experiment.accu_step=1")
    config = replace(config, optimizer=replace(config.optimizer, type="sgd", init_lr=0.3))
    torch.manual_seed(3)
    model, autoencoder = (
        make_stage2(config, Path(CHECKOUT)),
        make_autoencoder(config, Path(CHECKOUT)),
    )
    for parameter in model.parameters():
        if parameter.requires_grad:  # zeros at the start would hide everything
            nn.init.normal_(parameter, std=0.05)
    if hasattr(autoencoder.stage_1_model, "sample"):
        autoencoder.stage_1_model.sample = False  # of the latents' distribution, their mean
    interfaces = theirs("rqvae.models.interfaces")
    own: Any = copy.deepcopy(autoencoder)
    eager = interfaces.Stage2ModelWrapper(own.stage_1_model, copy.deepcopy(model), own.connector)
    ema = theirs("rqvae.models.ema").ExponentialMovingAverage(copy.deepcopy(eager), 0.9)
    optimizer = make_optimizer(eager.parameters(), config.optimizer)
    schedule = make_schedule(optimizer, config.optimizer, 2, config.experiment.epochs)
    simple = bool(model.use_simple_diffusion)
    shape = tuple(eager.encode(data_of(images(4, 32))).zs.shape)
    g = torch.Generator().manual_seed(5)
    drawn = torch.rand(4, generator=g) if simple else torch.randint(0, TIMES, (4,), generator=g)
    noise = torch.randn(shape, generator=g)
    worst = 0.0
    numbers: dict[str, Any] = {"randn_like": noise, "randint": drawn}
    batches = [images(4, 32, seed=number) for number in range(3)]
    with given_numbers(rand=[drawn] * 50, **numbers):
        step = make_step(Stage2(model, autoencoder), config, 2)
        state = step.init()
        for batch in batches:
            del batch["draws"]
            eager.zero_grad()
            inputs = data_of(batch)
            loss = eager.compute_loss(*eager(inputs), inputs)["loss_total"]
            loss.backward()
            norm = float(nn.utils.clip_grad_norm_(eager.parameters(), 0.5))
            optimizer.step()
            schedule.step()
            ema.update(eager)
            state, metrics = step(state, batch)
            got = [float(metrics["loss"]), float(metrics["grad_norm"])]
            assert got == pytest.approx([loss.item(), norm], rel=1e-4)
            off = [abs(a - b) / b for a, b in zip(got, [loss.item(), norm], strict=True)]
            worst = max(worst, *off)
    trained: Any = step.load_state(state).to_torch()
    averaged: Any = step.load_state(state, ema=True).to_torch()
    wanted = ema.module.stage_2_model
    off = {
        "numbers": worst,
        "weights": differences(trained.model.state_dict(), eager.stage_2_model.state_dict()),
        "averages": differences(averaged.model.state_dict(), wanted.state_dict()),
    }
    note(f"stage 2, {name}", **off)
    assert max(off.values()) < 1e-4, off


def data_of(batch: dict[str, torch.Tensor]) -> Any:
    data = theirs("rqvae.img_datasets.interfaces").LabeledImageData
    return data(img=batch["image"], condition=batch["label"].long())
