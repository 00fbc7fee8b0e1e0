"""A driving model in torch with the building blocks of the real ones.

It has convolutions over each camera (depthwise ones, too), a feature of 512 numbers per frame,
attention over the buffer of features, and heads with several hypotheses where the generation has
them. It can be small, or as large as the real ones.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from recipes.openpilot.constants import DESIRE_LEN, FRAME_SHAPE, TEMPORAL_SKIP
from recipes.openpilot.generations import FEATURE_LEN, GENERATIONS, FileKind
from tpuport.foundation.errors import UsageError

# What `python -m recipes.openpilot pretrain` wrote, and what has its heads and inputs.
PRETRAINED = "pretrained"
WEIGHTS = Path(__file__).with_name("pretrained.safetensors")
TRAINED_GENERATIONS = ("2026-07", "2026-09")
_TRAINED = GENERATIONS[TRAINED_GENERATIONS[0]][0]


@dataclass(frozen=True)
class Size:
    """The size of a model.

    Attributes:
        widths: Channels of the stages of a camera's convolutions. The first stage has a quarter of
            the picture's height and width, and each further stage half of the one before.
        depths: Residual blocks of each stage.
        expansion: Factor by which these are wider inside.
        where: Channels of the last stage's map that are kept with their positions.
        summary: Width between both cameras and the feature.
        policy: Width of the tokens.
        attention_heads: Attention heads of the policy.
        feed_forward: Factor by which the layer after attention is wider than the tokens; 0 for
            none.
        hidden: Width inside a head.
    """

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    expansion: int
    where: int
    summary: int
    policy: int
    attention_heads: int
    feed_forward: int
    hidden: int

    @property
    def seen(self) -> int:
        """Return the number of values per camera."""
        shrunk = 4 * 2 ** (len(self.widths) - 1)
        area = (FRAME_SHAPE[1] // shrunk) * (FRAME_SHAPE[2] // shrunk)
        return self.widths[-1] + self.where * area


# The stages of FastViT-S12 (Vasu et al., arXiv:2303.14189, table 2).
_S12 = Size((64, 128, 256, 512), (2, 2, 6, 2), 4, 16, 1024, 512, 8, 4, 256)
SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "small": Size((16, 32, 64), (0, 1, 1), 2, 2, 192, 96, 4, 0, 48),
        # Wider, so that it can learn to follow a lane in a quarter of an hour.
        PRETRAINED: Size((24, 48, 64), (0, 1, 1), 2, 8, 192, 96, 4, 0, 48),
        # As many weights as the files of 0.9.7 to early 2026 have.
        "real": _S12,
        # As many as driving_supercombo of July 2026; the depths are SA24's.
        "large": replace(_S12, depths=(4, 4, 12, 4)),
    }
)


class Residual(nn.Module):
    """A residual block of a depthwise convolution and a mix of channels, scaled by channel."""

    def __init__(self, width: int, expansion: int, scale: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, 1, 1, groups=width)
        self.widen = nn.Conv2d(width, expansion * width, 1)
        self.narrow = nn.Conv2d(expansion * width, width, 1)
        self.scale = nn.Parameter(torch.full((width, 1, 1), scale))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, width, h, w) to the same shape."""
        return x + self.scale * self.narrow(F.gelu(self.widen(self.depthwise(x))))


def _residuals(width: int, depth: int, expansion: int) -> nn.Sequential:
    """Return residual blocks whose scales add up to the same whatever their number."""
    return nn.Sequential(*(Residual(width, expansion, 0.5 / depth) for _ in range(depth)))


class ConvBlock(nn.Module):
    """A block that halves height and width.

    It has a depthwise convolution, a mix of channels, and residual blocks.
    """

    def __init__(self, inner: int, outer: int, depth: int, expansion: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(inner, inner, 3, 2, 1, groups=inner)
        self.mix = nn.Conv2d(inner, outer, 1)
        self.residuals = _residuals(outer, depth, expansion)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, inner, h, w) to (n, outer, h / 2, w / 2)."""
        return self.residuals(F.gelu(self.mix(self.down(x))))


class Encoder(nn.Module):
    """An encoder of the two frames of one camera: mean features, and a map with positions."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2 * FRAME_SHAPE[0], size.widths[0], 4, 4)
        self.first = _residuals(size.widths[0], size.depths[0], size.expansion)
        stages = zip(size.widths, size.widths[1:], size.depths[1:], strict=False)
        self.blocks = nn.ModuleList([ConvBlock(*stage, size.expansion) for stage in stages])
        self.where = nn.Conv2d(size.widths[-1], size.where, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, 12, 128, 256), from 0 to 255, to (n, seen)."""
        x = self.first(F.gelu(self.stem((x - 128.0) / 64.0)))
        for block in self.blocks:
            x = block(x)
        return torch.cat([x.mean((2, 3)), self.where(x).flatten(1)], dim=1)


class ResBlock(nn.Module):
    """An MLP with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, width) to the same shape."""
        return F.relu(x + self.down(F.relu(self.up(x))))


class Summarizer(nn.Module):
    """A join of both cameras to one feature."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.join = nn.Linear(2 * size.seen, size.summary)
        self.resblock = ResBlock(size.summary)
        self.feature = nn.Linear(size.summary, FEATURE_LEN)

    def forward(self, road: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        """Map two (n, seen) to (n, 512), with a norm of 8."""
        x = F.relu(self.join(torch.cat([road, wide], dim=1)))
        x = self.feature(self.resblock(x))
        return 8.0 * x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 1e-3)


class Hydra(nn.Module):
    """Heads on one trunk, each with its own MLP."""

    def __init__(self, width: int, heads: Mapping[str, int], hidden: int) -> None:
        super().__init__()
        self.trunk = ResBlock(width)
        for name, size in heads.items():
            layers = nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, size)
            self.add_module(name, nn.Sequential(*layers))
        self.names = tuple(heads)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Map (n, width) to each head, (n, its width)."""
        x = self.trunk(x)
        return {name: self.get_submodule(name)(x) for name in self.names}


class Attention(nn.Module):
    """Multi-head attention among the tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, t, width) to the same shape."""
        size = (x.shape[0], x.shape[1], self.heads, x.shape[2] // self.heads)
        q, k, v = (p.reshape(size).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1))
        scores = torch.matmul(q, k.transpose(2, 3)) / size[3] ** 0.5
        mixed = torch.matmul(scores.softmax(-1), v)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class FeedForward(nn.Module):
    """Two layers on each token, the first of them wider."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Linear(width, times * width)
        self.narrow = nn.Linear(times * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, t, width) to the same shape."""
        return x + self.narrow(F.gelu(self.widen(self.norm(x))))


class TemporalPolicy(nn.Module):
    """The policy: from the buffer of features and a generation's other inputs to heads."""

    def __init__(
        self, tokens: int, inputs: Mapping[str, tuple[int, ...]], heads: Any, size: Size
    ) -> None:
        super().__init__()
        width = size.policy
        self.project = nn.Linear(FEATURE_LEN, width)
        self.position = nn.Parameter(0.1 * torch.randn(1, tokens, width))
        self.attention = Attention(width, size.attention_heads)
        self.mlp = FeedForward(width, size.feed_forward) if size.feed_forward else nn.Identity()
        self.inputs = tuple(inputs)
        self.context = nn.Linear(sum(_size_of(shape) for shape in inputs.values()), width)
        self.temporal_hydra = Hydra(2 * width, heads, size.hidden)

    def forward(
        self, features: torch.Tensor, others: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Map (n, tokens, 512) and the other inputs to each head."""
        x = self.mlp(self.attention(self.project(features) + self.position))
        context = self.context(torch.cat([others[name].flatten(1) for name in self.inputs], dim=1))
        return self.temporal_hydra(torch.cat([x[:, -1] + x.mean(1), context], dim=1))


class DrivingModel(nn.Module):
    """One file of a generation. Its inputs are `kind.images` and then `kind.buffers`.

    Args:
        kind: The file.
        size: Size of the model.
    """

    def __init__(self, kind: FileKind, size: Size) -> None:
        super().__init__()
        self.kind = kind
        planned = {"plan", "desire_state", "desired_curvature"}
        given = {"hidden_state", "pad"}
        if kind.images:
            self.road, self.wide = Encoder(size), Encoder(size)
            self.summarizer = Summarizer(size)
            seen = {n: w for n, w in kind.heads.items() if n not in planned | given}
            self.hydra = Hydra(FEATURE_LEN, seen, size.hidden)
        if kind.buffers:
            others = {n: s for n, s in kind.buffers.items() if n != "features_buffer"}
            tokens = kind.buffers["features_buffer"][1] + (1 if kind.images else 0)
            policy = {n: w for n, w in kind.heads.items() if n in planned}
            self.policy = TemporalPolicy(tokens, others, policy, size)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Map inputs as in the contract, with n for its 1, to (n, all heads)."""
        names = (*self.kind.images, *self.kind.buffers)
        by_name = dict(zip(names, inputs, strict=True))
        feature = None
        if self.kind.images:
            feature = self.see(*(by_name[name] for name in self.kind.images))
        return self.say(feature, by_name)

    def see(self, road: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        """Map both cameras' (n, 12, 128, 256) to the feature (n, 512)."""
        dtype = next(self.parameters()).dtype
        return self.summarizer(self.road(road.to(dtype)), self.wide(wide.to(dtype)))

    def say(
        self, feature: torch.Tensor | None, buffers: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Map the result of `see`, if the file has cameras, and the buffers to (n, all heads)."""
        found: dict[str, torch.Tensor] = {}
        if feature is not None:
            found = {**self.hydra(feature), "hidden_state": feature}
        if self.kind.buffers:
            features = buffers["features_buffer"]
            if feature is not None:
                features = torch.cat([features, feature.unsqueeze(1)], dim=1)
            found |= self.policy(features, buffers)
        if "pad" in self.kind.heads:
            first = next(iter(found.values()))
            found["pad"] = torch.zeros(len(first), self.kind.heads["pad"], dtype=first.dtype)
        return torch.cat([found[name] for name in self.kind.heads], dim=1)


class StatefulModel(nn.Module):
    """A supercombo with its queues in the graph.

    The queues are those of commaai/openpilot's selfdrive/modeld/models/add_history.py.

    Args:
        model: A model with `img`, `big_img`, `features_buffer` and `desire_pulse`.
    """

    def __init__(self, model: DrivingModel) -> None:
        super().__init__()
        self.model = model
        self.feature = model.kind.slices["hidden_state"]

    def forward(
        self,
        new_img: torch.Tensor,
        desire: torch.Tensor,
        traffic_convention: torch.Tensor,
        action_t: torch.Tensor,
        state_img_q: torch.Tensor,
        state_desire_q: torch.Tensor,
        state_feat_q: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Map one frame and the queues to the heads (1, all) and the new queues."""
        dtype = next(self.parameters()).dtype
        img_q = torch.cat([state_img_q[:, 1:], new_img.unsqueeze(1)], dim=1)
        desire_q = torch.cat([state_desire_q[1:], desire.reshape(1, 1, -1)])
        images = img_q[:, ::TEMPORAL_SKIP].reshape(2, 1, 2 * FRAME_SHAPE[0], *FRAME_SHAPE[1:])
        pooled = desire_q.reshape(-1, TEMPORAL_SKIP, 1, DESIRE_LEN).amax(1).transpose(0, 1)
        features = state_feat_q[::TEMPORAL_SKIP].transpose(0, 1)
        given = (features, pooled, traffic_convention, action_t)
        out = self.model(images[0], images[1], *(value.to(dtype) for value in given)).float()
        feat_q = torch.cat([state_feat_q[1:], out[:, self.feature].unsqueeze(0)])
        return out, img_q, desire_q, feat_q


def _size_of(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape[1:]:
        size *= dim
    return size


def build(kind: FileKind, seed: int = 0, size: str = "small", *, trained: bool = True) -> nn.Module:
    """Return the torch module of a file, with random weights, or in size `PRETRAINED` with trained.

    Args:
        kind: The file.
        seed: Random seed of the weights.
        size: One of `SIZES`.
        trained: Whether the size `PRETRAINED` has its trained weights.

    Raises:
        UsageError: There is no such size, or no trained weights for the file.
    """
    if size not in SIZES:
        raise UsageError(f"size={size!r}: expected one of {', '.join(SIZES)}")
    trained = trained and size == PRETRAINED
    if trained and (kind.heads, kind.buffers) != (_TRAINED.heads, _TRAINED.buffers):
        raise UsageError(
            f"size={size!r} of {kind.name}: there are trained weights for the generations"
            f" {' and '.join(TRAINED_GENERATIONS)} only. What to do: give one of them, or the size"
            " small, whose weights are random"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DrivingModel(kind, SIZES[size]).eval()
        for module in model.modules():
            # torch's default initialization is so small that no signal of the picture is left after
            # three layers.
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        for name, module in model.named_modules():
            # The last layer of a head.
            if name.endswith(".2") and isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
    if trained:
        model.load_state_dict({name: value.float() for name, value in load_file(WEIGHTS).items()})
    return StatefulModel(model).eval() if kind.stateful else model
