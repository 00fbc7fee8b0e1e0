"""Small models of real code bases, built from a copy of their source that is on `sys.path`.

Used by `benchmarks.rewritten` for the original and for the rewritten code. Packages that their
files import but a step does not need (simulators, LoRA, loggers) are replaced by stubs, in both
copies alike.
"""

import importlib
import logging
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks.stand_ins import (
    Mlp,
    StandIns,
    flex_attention,
    plain_config,
    quiet_logger,
    stand_in,
)

Results = dict[str, torch.Tensor]
Inputs = dict[str, torch.Tensor]

SEED = 7


@dataclass(frozen=True)
class Case:
    """One computation of a model.

    Attributes:
        name: Its name in the table.
        build: Makes the model. Its parameters are set from `SEED` afterwards.
        call: Returns the results to compare, by name. `loss`, if there is one, is differentiated.
        inputs: Tensors for the call.
        is_random: Whether the call draws random numbers.
        close: Relative tolerance between original and rewritten in eager PyTorch; 0 is bit-equal.
    """

    name: str
    build: Callable[[], nn.Module]
    call: Callable[[Any, Inputs], Results]
    inputs: Callable[[], Inputs]
    is_random: bool = False
    close: float = 0.0


class Call(nn.Module):
    """A function of a model and tensors as a module, so that it can be ported."""

    def __init__(self, model: nn.Module, function: Callable[[Any, Inputs], Results]) -> None:
        super().__init__()
        self.model, self.function = model, function

    def forward(self, inputs: Inputs) -> Results:
        """Return the results that the case compares."""
        return self.function(self.model, inputs)


def built(case: Case) -> Call:
    """Return the model of a case, always with the same parameters, none of them zero."""
    torch.manual_seed(SEED)
    model = case.build()
    generator = torch.Generator().manual_seed(SEED)
    for parameter in model.parameters():
        # A frozen parameter is a setting: the planner's eta is the inverse of a tanh that is 1.
        if parameter.requires_grad:
            scale = parameter.shape[-1] ** -0.5
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = (parameter.ndim == 1) + scale * noise
    return Call(model, case.call)


# ReCogDrive.

_NOT_NEEDED = ("nuplan", "navsim.common", "navsim.evaluate", "navsim.planning", "peft")
_DIT: dict[str, Any] = {
    "num_heads": 2,
    "head_dim": 16,
    "num_layers": 4,
    "output_dim": 24,
    "dropout": 0.0,
    "attention_bias": True,
    "interleave_attention": True,
}


def _planner() -> nn.Module:
    with plain_config():
        module = importlib.import_module("navsim.agents.recogdrive.recogdrive_diffusion_planner")
    config = module.ReCogDriveDiffusionPlannerConfig(
        diffusion_model_cfg=_DIT,
        input_embedding_dim=32,
        hidden_size=40,
        vlm_size="small",
        sampling_method="ddim",
    )
    planner = module.ReCogDriveDiffusionPlanner(config)
    # Training by reinforcement sets these, and `sample_chain` and `get_logprobs` read them.
    for name, value in vars(module.GRPOConfig()).items():
        if isinstance(value, float):
            setattr(planner, name, value)
    return planner


def _random(generator: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=generator)


def _planner_inputs() -> Inputs:
    generator = torch.Generator().manual_seed(SEED)
    return {
        "tokens": _random(generator, 2, 5, 1536),
        "his_traj": _random(generator, 2, 12),
        "status_feature": _random(generator, 2, 8),
        "action": _random(generator, 2, 8, 3),
        "chain": _random(generator, 2, 6, 8, 3),
    }


def _batch(inputs: Inputs) -> Any:
    feature = importlib.import_module("transformers.feature_extraction_utils").BatchFeature
    return feature({name: inputs[name] for name in ("his_traj", "status_feature", "action")})


def _action(*, deterministic: bool) -> Callable[[Any, Inputs], Results]:
    def call(planner: Any, inputs: Inputs) -> Results:
        return dict(
            planner.get_action(inputs["tokens"], _batch(inputs), deterministic=deterministic)
        )

    return call


def _sample_chain(planner: Any, inputs: Inputs) -> Results:
    chain, trajectory = planner.sample_chain(
        inputs["tokens"], inputs["his_traj"], inputs["status_feature"]
    )
    return {"chain": chain, "trajectory": trajectory}


def _log_probs(planner: Any, inputs: Inputs) -> Results:
    found = planner.get_logprobs(
        inputs["tokens"], inputs["his_traj"], inputs["status_feature"], inputs["chain"]
    )
    return {"log_probs": found, "loss": found.mean()}


def _dit() -> nn.Module:
    return importlib.import_module("navsim.agents.recogdrive.recogdrive_dit").LightningDiT(**_DIT)


def _dit_inputs() -> Inputs:
    generator = torch.Generator().manual_seed(SEED)
    return {
        "hidden_states": _random(generator, 2, 8, 32),
        "encoder_hidden_states": _random(generator, 2, 5, 32),
        "conditioning_features": _random(generator, 2, 32),
        "timesteps": torch.tensor([3, 80]),
    }


def _dit_call(model: Any, inputs: Inputs) -> Results:
    out = model(**inputs)
    return {"out": out, "loss": out.square().mean()}


_IMAGE_TOKEN = 77


def _chat_model() -> nn.Module:
    package = importlib.import_module("internvl.model.internvl_chat")
    config = package.InternVLChatConfig(
        vision_config={
            "architectures": ["InternVisionModel"],
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "image_size": 28,
            "patch_size": 7,
            "drop_path_rate": 0.0,
        },
        llm_config={
            "architectures": ["Qwen2ForCausalLM"],
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "vocab_size": 128,
        },
        template="internvl2_5",
        force_image_size=28,
        downsample_ratio=0.5,
        ps_version="v2",
    )
    model = package.InternVLChatModel(config)
    model.img_context_token_id = _IMAGE_TOKEN
    return model.train()


def _chat_inputs(*flags: int) -> Callable[[], Inputs]:
    """Return a function that makes two samples with one tile in each text, and a tile per flag."""

    def make() -> Inputs:
        generator = torch.Generator().manual_seed(SEED)
        tokens = torch.randint(1, _IMAGE_TOKEN, (2, 24), generator=generator)
        tokens[0, 2:6] = tokens[1, 5:9] = _IMAGE_TOKEN
        tokens[1, 18:] = 0  # padding
        labels = tokens.masked_fill((tokens == 0) | (tokens == _IMAGE_TOKEN), -100)
        return {
            "pixel_values": _random(generator, len(flags), 3, 28, 28),
            "input_ids": tokens,
            "attention_mask": tokens != 0,
            "image_flags": torch.tensor(flags)[:, None],
            "labels": labels,
        }

    return make


def _chat_call(model: Any, inputs: Inputs) -> Results:
    found = model(**inputs, return_dict=True)
    return {"loss": found.loss, "logits": found.logits}


def prepare_recogdrive() -> None:
    """Make the files of ReCogDrive importable."""
    # These probe for optional packages at import time, and must not find the stubs.
    for name in ("diffusers.models.embeddings", "transformers.modeling_utils"):
        importlib.import_module(name)
    stand_in("timm.models.layers", Mlp=Mlp, DropPath=nn.Dropout)
    sys.meta_path.insert(0, StandIns(_NOT_NEEDED))


RECOGDRIVE = (
    Case("planner.forward", _planner, lambda m, i: dict(m(i["tokens"], _batch(i))),
         _planner_inputs, is_random=True),
    Case("planner.get_action", _planner, _action(deterministic=False), _planner_inputs,
         is_random=True),
    Case("planner.get_action, deterministic", _planner, _action(deterministic=True),
         _planner_inputs, is_random=True),
    Case("planner.sample_chain", _planner, _sample_chain, _planner_inputs, is_random=True),
    Case("planner.get_logprobs", _planner, _log_probs, _planner_inputs),
    Case("LightningDiT", _dit, _dit_call, _dit_inputs),
    Case("InternVLChatModel", _chat_model, _chat_call, _chat_inputs(1, 1)),
    Case("InternVLChatModel, one flag 0", _chat_model, _chat_call, _chat_inputs(1, 0, 1)),
    Case("InternVLChatModel, too few image tokens", _chat_model, _chat_call,
         _chat_inputs(1, 1, 1)),
)  # fmt: skip


# HunyuanVideo-1.5.


def _video_model() -> nn.Module:
    module = importlib.import_module("hyvideo.models.transformers.hunyuanvideo_1_5_transformer")
    return module.HunyuanVideo_1_5_DiffusionTransformer(
        patch_size=[1, 1, 1],
        in_channels=4,
        out_channels=4,
        hidden_size=32,
        heads_num=2,
        mlp_width_ratio=2.0,
        mm_double_blocks_depth=2,
        mm_single_blocks_depth=1,
        rope_dim_list=[4, 6, 6],
        text_states_dim=24,
        glyph_byT5_v2=True,
        vision_projection="linear",
        vision_states_dim=20,
        use_cond_type_embedding=True,
        attn_mode="torch",
    ).eval()


def _video_inputs(*, vision: float | None, padded: bool = True) -> Callable[[], Inputs]:
    """Return a function that makes a batch of two with padded texts and scaled vision tokens."""

    def make() -> Inputs:
        generator = torch.Generator().manual_seed(SEED)
        lengths = torch.tensor([[4], [6]]) if padded else torch.tensor([[7], [7]])
        glyphs = torch.tensor([[0], [3]]) if padded else torch.tensor([[5], [5]])
        inputs = {
            "hidden_states": _random(generator, 2, 9, 2, 3, 4),
            "timestep": torch.tensor([1000.0, 420.0]),
            "text_states": _random(generator, 2, 7, 24),
            "encoder_attention_mask": (torch.arange(7) < lengths).long(),
            "byt5_text_states": _random(generator, 2, 5, 1472),
            "byt5_text_mask": (torch.arange(5) < glyphs).long(),
        }
        if vision is not None:
            inputs["vision_states"] = vision * _random(generator, 2, 3, 20)
        return inputs

    return make


def _video_call(mask_type: str) -> Callable[[Any, Inputs], Results]:
    def call(model: Any, inputs: Inputs) -> Results:
        glyphs = {name: inputs[name] for name in ("byt5_text_states", "byt5_text_mask")}
        rest = {name: value for name, value in inputs.items() if name not in glyphs}
        noise, _ = model(**rest, text_states_2=None, mask_type=mask_type, extra_kwargs=glyphs)
        return {"noise": noise, "loss": noise.square().mean()}

    return call


def prepare_hunyuan() -> None:
    """Make the files of HunyuanVideo-1.5 importable."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    vars(flex)["flex_attention"] = flex_attention
    stand_in("loguru", logger=quiet_logger())
    states = importlib.import_module("hyvideo.commons.parallel_states")
    try:
        states.get_parallel_state()
    except Exception as error:  # without CUDA it works only after it is rewritten
        logging.getLogger("upstream").info("stood in for the device mesh: %s", error)
        vars(states)["__parallel_dims"] = types.SimpleNamespace(sp=1, sp_enabled=False)


HUNYUAN = (
    Case("HunyuanVideo, t2v", _video_model, _video_call("t2v"), _video_inputs(vision=0.0)),
    Case("HunyuanVideo, i2v", _video_model, _video_call("i2v"), _video_inputs(vision=1.0)),
    Case("HunyuanVideo, t2v with an image", _video_model, _video_call("t2v"),
         _video_inputs(vision=1.0)),
    Case("HunyuanVideo, no vision", _video_model, _video_call("t2v"), _video_inputs(vision=None)),
    Case("HunyuanVideo, no padding", _video_model, _video_call("i2v"),
         _video_inputs(vision=1.0, padded=False)),
)  # fmt: skip


@dataclass(frozen=True)
class Upstream:
    """An upstream code base.

    Attributes:
        commit: The repository and commit that were tried.
        packages: Its folders of Python files, each as a pair: a path to put on `sys.path`, and the
            package in it.
        prepare: Called before any of it is imported.
        cases: The computations to run.
    """

    commit: str
    packages: tuple[tuple[str, str], ...]
    prepare: Callable[[], None]
    cases: tuple[Case, ...]


UPSTREAM = {
    "recogdrive": Upstream(
        "zorrofox/recogdrive 6b4663b",
        ((".", "navsim"), ("internvl_chat", "internvl")),
        prepare_recogdrive,
        RECOGDRIVE,
    ),
    "hunyuan": Upstream(
        "Tencent-Hunyuan/HunyuanVideo-1.5 60783e7", ((".", "hyvideo"),), prepare_hunyuan, HUNYUAN
    ),
}
