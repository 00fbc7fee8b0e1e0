"""The sizes of π0 and π0.5."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpuport.foundation.errors import UsageError

# The cameras, in the order in which the model reads them.
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")


@dataclass(frozen=True)
class Transformer:
    """The sizes of a Gemma: the language model, or the expert for actions."""

    width: int
    depth: int
    mlp: int
    heads: int = 8
    kv_heads: int = 1
    head_dim: int = 256


@dataclass(frozen=True)
class Vision:
    """The sizes of the SigLIP that encodes an image."""

    width: int = 1152
    depth: int = 27
    mlp: int = 4304
    heads: int = 16
    image_size: int = 224
    patch_size: int = 14

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of an image."""
        return (self.image_size // self.patch_size) ** 2


@dataclass(frozen=True)
class Config:
    """The sizes of a policy. The defaults are those of openpi's published models.

    Attributes:
        pi05: Whether it is π0.5: the state is part of the prompt, and the time of the flow scales
            and shifts the expert's norms.
        action_dim: Numbers of an action and of the state, with padding.
        action_horizon: Actions of a chunk.
        max_token_len: Longest prompt in tokens; 0 for openpi's 48 (π0) or 200 (π0.5).
        vocab_size: Tokens of PaliGemma.
        language: Sizes of the language model.
        expert: Sizes of the expert, whose depth, heads and head dim are the language model's.
        vision: Sizes of the image encoder.
    """

    pi05: bool = False
    action_dim: int = 32
    action_horizon: int = 50
    max_token_len: int = 0
    vocab_size: int = 257_152
    language: Transformer = field(default_factory=lambda: Transformer(2048, 18, 16_384))
    expert: Transformer = field(default_factory=lambda: Transformer(1024, 18, 4096))
    vision: Vision = field(default_factory=Vision)

    def __post_init__(self) -> None:
        """Check that both transformers fit together, as the expert reads the other one's keys."""
        if not self.max_token_len:
            object.__setattr__(self, "max_token_len", 200 if self.pi05 else 48)
        for name in ("depth", "kv_heads", "head_dim"):
            ours, theirs = getattr(self.expert, name), getattr(self.language, name)
            if ours != theirs:
                raise UsageError(
                    f"expert.{name}={ours} and language.{name}={theirs}: expected equal numbers,"
                    " since the expert attends to the language model's keys"
                )

    def save(self, path: Path) -> None:
        """Write the sizes as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")


_TINY = {
    "action_dim": 16,
    "action_horizon": 8,
    "max_token_len": 48,
    "vocab_size": 512,
    "language": Transformer(64, 3, 128, heads=4, head_dim=16),
    "expert": Transformer(48, 3, 96, heads=4, head_dim=16),
    "vision": Vision(32, 2, 64, heads=2, image_size=56),
}
SIZES = {
    "pi0": Config(),
    "pi05": Config(pi05=True),
    "tiny-pi0": Config(**_TINY),
    "tiny-pi05": Config(**{**_TINY, "max_token_len": 128}, pi05=True),
}


def config_of(size: str) -> Config:
    """Return the sizes of a name.

    Raises:
        UsageError: There is no such size.
    """
    if size not in SIZES:
        raise UsageError(f"size={size!r}: expected one of {', '.join(SIZES)}")
    return SIZES[size]


def read_config(path: Path) -> Config:
    """Read what `Config.save` wrote.

    Raises:
        UsageError: The file is not there, or is not of sizes.
    """
    parts = {"language": Transformer, "expert": Transformer, "vision": Vision}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        sizes = {name: parts[name](**found.pop(name)) for name in parts if name in found}
        return Config(**found, **sizes)
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(
            f"{path} does not hold the sizes of a policy: {error}. What to do: give a folder that"
            " `make-weights` or `finetune` wrote, or put a config.json beside openpi's"
            " model.safetensors"
        ) from error
