"""The vision-language model: sizes, weights, and the loss and hidden states of static batches."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tpuport.foundation.errors import UsageError


@dataclass(frozen=True)
class Size:
    """The widths and depths of a model like InternVL 3.

    Attributes:
        text: Keyword arguments of transformers' Qwen2Config.
        vision: Keyword arguments of transformers' InternVLVisionConfig.
    """

    text: dict[str, Any]
    vision: dict[str, Any]


_VIT_300M = {
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "intermediate_size": 4096,
    "image_size": 448,
    "patch_size": 14,
}
# From the config.json of each on the Hugging Face Hub; "tiny" is for a laptop.
SIZES = {
    "tiny": Size(
        {
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 128,
            "max_position_embeddings": 4096,
        },
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "image_size": 56,
            "patch_size": 14,
        },
    ),
    "internvl3-2b": Size(
        {
            "hidden_size": 1536,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "intermediate_size": 8960,
            "max_position_embeddings": 32768,
        },
        _VIT_300M,
    ),
    "internvl3-8b": Size(
        {
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "max_position_embeddings": 32768,
        },
        _VIT_300M,
    ),
}
VOCAB_SIZE = 151_674  # of InternVL 3


def make_config(
    size: str,
    *,
    vocab_size: int = VOCAB_SIZE,
    image_token: int = 151_667,
    force_image_size: int | None = None,
    down_sample_ratio: float = 0.5,
) -> Any:
    """Return transformers' InternVLConfig of a size.

    Args:
        size: One of `SIZES`.
        vocab_size: Size of the tokenizer, with added tokens.
        image_token: Id of `<IMG_CONTEXT>`.
        force_image_size: Side of a tile in pixels; by default that of the size.
        down_sample_ratio: Factor by which a tile's patches are reduced in each direction.

    Raises:
        UsageError: There is no such size.
    """
    from transformers import InternVLConfig

    if size not in SIZES:
        raise UsageError(f"size {size!r}: expected one of {', '.join(SIZES)}")
    one = SIZES[size]
    vision = {
        **one.vision,
        "model_type": "internvl_vision",
        "attention_bias": True,
        "use_mean_pooling": True,
    }
    if force_image_size is not None:
        vision["image_size"] = force_image_size
    text = {
        **one.text,
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        "tie_word_embeddings": False,
    }
    return InternVLConfig(
        vision_config=vision,
        text_config=text,
        image_token_id=image_token,
        image_seq_length=tokens_per_tile(vision["image_size"], 14, down_sample_ratio),
        downsample_ratio=down_sample_ratio,
        tie_word_embeddings=False,
    )


def tokens_per_tile(image_size: int, patch_size: int, down_sample_ratio: float) -> int:
    """Return the number of tokens per tile."""
    return int((image_size // patch_size) ** 2 * down_sample_ratio**2)


def make_vlm(config: Any, seed: int = 0) -> Any:
    """Return transformers' InternVLForConditionalGeneration in float32 with random weights."""
    from transformers import InternVLForConditionalGeneration

    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return InternVLForConditionalGeneration(config)


class ChatModel(torch.nn.Module):
    """A VLM called with static batches: rows of tokens with segments, tiles with flags.

    Each row is independent: its image tokens get the features of its own tiles whose flag is 1, in
    order. A row with other numbers of both is ignored, and adds exactly nothing to the loss.

    Attributes:
        vlm: transformers' InternVLForConditionalGeneration.
        image_token: Id of `<IMG_CONTEXT>`.
        loss_chunk: Number of tokens of a row for which logits are computed at a time, and
            recomputed in the backward pass, since a vocabulary is wide.
    """

    def __init__(self, vlm: Any, image_token: int, loss_chunk: int = 1024) -> None:
        super().__init__()
        self.vlm = vlm
        self.image_token = image_token
        self.loss_chunk = loss_chunk

    # Methods that differ between transformers' model and upstream's.

    def parts(self) -> dict[str, torch.nn.Module]:
        """Return the modules that flags freeze: "backbone", "mlp" and "llm"."""
        inner = self.vlm.model
        return {
            "backbone": inner.vision_tower,
            "mlp": inner.multi_modal_projector,
            "llm": torch.nn.ModuleList([inner.language_model, self.vlm.lm_head]),
        }

    def tile_features(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """Return features (tiles, tokens of a tile, width) of pixels (tiles, 3, side, side)."""
        inner = self.vlm.model
        # The tower is called directly, since `get_image_features` records hidden states that are
        # not needed.
        patches = inner.vision_tower(pixel_values=pixel_values).last_hidden_state[:, 1:]
        side = int(patches.shape[1] ** 0.5)
        grid = patches.reshape(len(patches), side, side, -1)
        grid = inner.pixel_shuffle(grid, scale_factor=inner.config.downsample_ratio)
        return inner.multi_modal_projector(grid.flatten(1, 2))

    def language(self, **given: Any) -> torch.Tensor:
        """Return the last hidden states of the language model, after its last norm."""
        return self.vlm.model.language_model(**given, use_cache=False).last_hidden_state

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of tokens."""
        return self.vlm.get_input_embeddings()(input_ids)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits from hidden states."""
        return self.vlm.get_output_embeddings()(hidden)

    # Methods that both share.

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        pixel_values: torch.Tensor,
        image_flags: torch.Tensor,
        segments: torch.Tensor,
        position_ids: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the last hidden states of each token, and which rows fit.

        A row fits if it has as many image tokens as features.

        Args:
            input_ids: (rows, length).
            pixel_values: (rows, tiles, 3, side, side).
            image_flags: (rows, tiles); 1 for a tile that counts.
            segments: (rows, length); the number of each token's sample, from 1, and 0 for padding,
                which attends to nothing and is not attended to.
            position_ids: (rows, length); the position of each token in its sample.

        Returns:
            (rows, length, width) and bool (rows,).
        """
        features = self.tile_features(pixel_values.flatten(0, 1))
        features = features.unflatten(0, pixel_values.shape[:2])
        embeds, fits = place_features(
            self.embed(input_ids), features, input_ids == self.image_token, image_flags == 1
        )
        hidden = self.language(
            inputs_embeds=embeds,
            attention_mask=attention_mask(segments),
            position_ids=position_ids.long(),
        )
        return hidden, fits

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        loss_weight: torch.Tensor,
        pixel_values: torch.Tensor,
        image_flags: torch.Tensor,
        segments: torch.Tensor,
        position_ids: torch.Tensor,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the weighted mean of the labels' cross entropy, and metrics.

        Args:
            input_ids: See `hidden_states`.
            labels: (rows, length); -100 for no label.
            loss_weight: (rows, length); the weight of each label.
            pixel_values: See `hidden_states`.
            image_flags: See `hidden_states`.
            segments: See `hidden_states`.
            position_ids: See `hidden_states`.

        Returns:
            The loss, and "weight" (the total weight of the mean), "num_labels" and "ignored_rows".
        """
        hidden, fits = self.hidden_states(
            input_ids, pixel_values, image_flags, segments, position_ids
        )
        hidden, targets = hidden[:, :-1], labels[:, 1:].long()
        weight = loss_weight[:, 1:] * fits[:, None]
        losses = [
            checkpoint(self._chunk_loss, *parts, use_reentrant=False)
            for parts in zip(
                *(x.split(self.loss_chunk, dim=1) for x in (hidden, targets, weight)), strict=True
            )
        ]
        total = weight.sum()
        loss = torch.stack(losses).sum() / torch.where(total > 0, total, 1.0)
        return loss, {
            "weight": total,
            "num_labels": ((targets >= 0) & fits[:, None]).sum().float(),
            "ignored_rows": (~fits).sum().float(),
        }

    def _chunk_loss(
        self, hidden: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of the cross entropy of some tokens of each row."""
        logits = self.head(hidden).float().flatten(0, 1)
        losses = F.cross_entropy(logits, targets.flatten(), reduction="none", ignore_index=-100)
        return (losses * weight.flatten()).sum()


def place_features(
    embeds: torch.Tensor,
    features: torch.Tensor,
    is_image: torch.Tensor,
    counts: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace the embeddings of image tokens by the features of the row's tiles that count.

    Args:
        embeds: (rows, length, width).
        features: (rows, tiles, tokens of a tile, width).
        is_image: bool (rows, length).
        counts: bool (rows, tiles).

    Returns:
        (rows, length, width), and bool (rows,): whether there are as many image tokens as features.
    """
    per_tile, width = features.shape[2:]
    # Moves the tiles that count to the front, in order.
    order = (~counts).int().argsort(dim=1, stable=True)
    number = (is_image.int().cumsum(dim=1) - 1).clamp(0, counts.shape[1] * per_tile - 1)
    tile = order.gather(1, number.div(per_tile, rounding_mode="floor").long())
    index = (tile * per_tile + number % per_tile).long()
    placed = features.flatten(1, 2).gather(1, index[..., None].expand(-1, -1, width))
    fits = is_image.sum(dim=1) == counts.sum(dim=1) * per_tile
    return torch.where(is_image[..., None], placed.to(embeds.dtype), embeds), fits


def attention_mask(segments: torch.Tensor) -> torch.Tensor:
    """Return a mask by which queries attend to themselves and earlier keys of their own segment.

    Args:
        segments: (rows, length), 0 for padding, which attends to nothing.

    Returns:
        bool (rows, 1, queries, keys).
    """
    queries, keys = segments[:, None, :, None], segments[:, None, None, :]
    position = torch.arange(segments.shape[1], device=segments.device)
    return (queries == keys) & (keys > 0) & (position[:, None] >= position[None, :])


def freeze(model: ChatModel, names: tuple[str, ...]) -> None:
    """Freeze some of `ChatModel.parts`."""
    parts = model.parts()
    for name in names:
        parts[name].requires_grad_(False)


def add_tokens(vlm: Any, tokenizer: Any, tokens: tuple[str, ...]) -> int:
    """Add special tokens that a tokenizer lacks, and rows for them to embeddings and head.

    A new row of the head is the mean of the old ones.

    Args:
        vlm: A model of transformers.
        tokenizer: A tokenizer of transformers.
        tokens: Tokens to add.

    Returns:
        The number of tokens that were added.
    """
    added = tokenizer.add_tokens(list(tokens), special_tokens=True)
    if added:
        resize: Callable[..., Any] = vlm.resize_token_embeddings
        resize(len(tokenizer), mean_resizing=False)
        head = vlm.get_output_embeddings().weight
        with torch.no_grad():
            head[-added:] = head[:-added].mean(dim=0, keepdim=True)
    return added
