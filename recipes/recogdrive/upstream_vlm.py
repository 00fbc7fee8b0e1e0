"""Upstream's own InternVLChatModel from an untouched checkout (xiaomi-research/recogdrive)."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from recipes.recogdrive.upstream import checkout_module
from recipes.recogdrive.vlm import ChatModel
from recipes.recogdrive.vlm_weights import to_transformers, to_upstream
from tpuport.foundation.errors import UsageError

ABSENT = ("decord", "torchvision", "deepspeed")


class UpstreamChatModel(ChatModel):
    """A `ChatModel` around upstream's InternVLChatModel, which is its `vlm`."""

    def parts(self) -> dict[str, torch.nn.Module]:
        """Return the modules that flags freeze."""
        return {
            "backbone": self.vlm.vision_model,
            "mlp": self.vlm.mlp1,
            "llm": self.vlm.language_model,
        }

    def tile_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return the features of tiles by `extract_feature`."""
        return self.vlm.extract_feature(pixel_values)

    def language(self, **given: Any) -> torch.Tensor:
        """Return the last hidden states of upstream's language model."""
        inner = self.vlm.language_model.model
        return inner(**given, use_cache=False).last_hidden_state

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens."""
        return self.vlm.language_model.get_input_embeddings()(input_ids)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits from hidden states."""
        return self.vlm.language_model.get_output_embeddings()(hidden)


@contextlib.contextmanager
def upstream_chat_model(
    checkout: str | Path, *, drop_path_rate: float = 0.0
) -> Iterator[Callable[[ChatModel], UpstreamChatModel]]:
    """Import a checkout, and yield a function from a `ChatModel` to upstream's, with weights.

    Convert and train it inside the block. It needs timm, peft and transformers.

    Args:
        checkout: Folder of the repository.
        drop_path_rate: Drop path of upstream's vision tower, in training.

    Raises:
        UsageError: There is no checkout.
    """
    name = "internvl.model.internvl_chat"
    with checkout_module(
        checkout, "internvl_chat", "internvl/model", name, absent=ABSENT
    ) as package:
        yield lambda model: _made(package, model, drop_path_rate)


def _made(package: Any, model: ChatModel, drop_path_rate: float) -> UpstreamChatModel:
    config = model.vlm.config
    vision, text = config.vision_config, config.text_config
    made = package.InternVLChatModel(
        package.InternVLChatConfig(
            vision_config={
                "architectures": ["InternVisionModel"],
                "hidden_size": vision.hidden_size,
                "num_hidden_layers": vision.num_hidden_layers,
                "num_attention_heads": vision.num_attention_heads,
                "intermediate_size": vision.intermediate_size,
                "image_size": vision.image_size[0],
                "patch_size": vision.patch_size[0],
                "norm_type": vision.norm_type,
                "layer_norm_eps": vision.layer_norm_eps,
                "qkv_bias": vision.attention_bias,
                "qk_normalization": vision.use_qk_norm,
                "drop_path_rate": drop_path_rate,
            },
            llm_config={**text.to_dict(), "architectures": ["Qwen2ForCausalLM"]},
            template="internvl2_5",
            force_image_size=vision.image_size[0],
            downsample_ratio=config.downsample_ratio,
            ps_version="v2",
        ),
        use_flash_attn=False,
    )
    made.load_state_dict(to_upstream(model.vlm.state_dict()))
    made.img_context_token_id = model.image_token
    implementation = made.language_model.config._attn_implementation
    if implementation != "sdpa":
        raise UsageError(
            f"upstream's language model took {implementation!r} attention, which reads no mask of"
            " segments. What to do: install a transformers whose Qwen 2 has 'sdpa'"
        )
    return UpstreamChatModel(made, model.image_token, model.loss_chunk)


def back_to_transformers(trained: UpstreamChatModel, model: ChatModel) -> ChatModel:
    """Return the `ChatModel` with the weights of the upstream model trained in its place."""
    model.vlm.load_state_dict(to_transformers(trained.vlm.state_dict()))
    return model
