"""A small driving model in torch, of what the real ones are built of: convolutions over each camera
(depthwise ones too), a feature of 512 numbers a frame, attention over the buffer of features, and
heads with several hypotheses where the generation has them.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from recipes.openpilot.constants import DESIRE_LEN, FRAME_SHAPE, TEMPORAL_SKIP
from recipes.openpilot.generations import FEATURE_LEN, FileKind


class ConvBlock(nn.Module):
    """Half the height and width: a depthwise convolution, then a mix of channels, and a residual
    one of the same, scaled by channel.
    """

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.down = nn.Conv2d(inner, inner, 3, 2, 1, groups=inner)
        self.mix = nn.Conv2d(inner, outer, 1)
        self.depthwise = nn.Conv2d(outer, outer, 3, 1, 1, groups=outer)
        self.widen = nn.Conv2d(outer, 2 * outer, 1)
        self.narrow = nn.Conv2d(2 * outer, outer, 1)
        self.scale = nn.Parameter(torch.full((outer, 1, 1), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, inner, h, w) to (n, outer, h / 2, w / 2)."""
        x = F.gelu(self.mix(self.down(x)))
        return x + self.scale * self.narrow(F.gelu(self.widen(self.depthwise(x))))


class Encoder(nn.Module):
    """The two frames of one camera to 320 numbers: what is seen, and where in the picture."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2 * FRAME_SHAPE[0], 16, 4, 4)
        self.blocks = nn.ModuleList([ConvBlock(16, 32), ConvBlock(32, 64)])
        self.where = nn.Conv2d(64, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, 12, 128, 256), 0 to 255, to (n, 320)."""
        x = F.gelu(self.stem((x - 128.0) / 64.0))
        for block in self.blocks:
            x = block(x)
        return torch.cat([x.mean((2, 3)), self.where(x).flatten(1)], dim=1)


class ResBlock(nn.Module):
    """An MLP beside its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, width) to the same."""
        return F.relu(x + self.down(F.relu(self.up(x))))


class Summarizer(nn.Module):
    """What both cameras show to one feature."""

    def __init__(self) -> None:
        super().__init__()
        self.join = nn.Linear(2 * 320, 192)
        self.resblock = ResBlock(192)
        self.feature = nn.Linear(192, FEATURE_LEN)

    def forward(self, road: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        """(n, 320) each to (n, 512), of length 8."""
        x = F.relu(self.join(torch.cat([road, wide], dim=1)))
        x = self.feature(self.resblock(x))
        return 8.0 * x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 1e-3)


class Hydra(nn.Module):
    """Heads on one trunk, each an MLP of its own."""

    def __init__(self, width: int, heads: Mapping[str, int]) -> None:
        super().__init__()
        self.trunk = ResBlock(width)
        for name, size in heads.items():
            self.add_module(
                name, nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, size))
            )
        self.names = tuple(heads)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """(n, width) to each head (n, its width)."""
        x = self.trunk(x)
        return {name: self.get_submodule(name)(x) for name in self.names}


class Attention(nn.Module):
    """Attention among the tokens, with heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(n, t, width) to the same."""
        size = (x.shape[0], x.shape[1], self.heads, x.shape[2] // self.heads)
        q, k, v = (p.reshape(size).transpose(1, 2) for p in self.qkv(self.norm(x)).chunk(3, -1))
        scores = torch.matmul(q, k.transpose(2, 3)) / size[3] ** 0.5
        mixed = torch.matmul(scores.softmax(-1), v)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


class TemporalPolicy(nn.Module):
    """The buffer of features, and what else a generation gives, to the heads of a policy."""

    def __init__(self, tokens: int, inputs: Mapping[str, tuple[int, ...]], heads: Any) -> None:
        super().__init__()
        self.project = nn.Linear(FEATURE_LEN, 96)
        self.position = nn.Parameter(0.1 * torch.randn(1, tokens, 96))
        self.attention = Attention(96, 4)
        self.inputs = tuple(inputs)
        self.context = nn.Linear(sum(_size_of(shape) for shape in inputs.values()), 96)
        self.temporal_hydra = Hydra(192, heads)

    def forward(
        self, features: torch.Tensor, others: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """(n, tokens, 512) and the other inputs to each head."""
        x = self.attention(self.project(features) + self.position)
        context = self.context(torch.cat([others[name].flatten(1) for name in self.inputs], dim=1))
        return self.temporal_hydra(torch.cat([x[:, -1] + x.mean(1), context], dim=1))


class DrivingModel(nn.Module):
    """One file of a generation; its inputs are `kind.images` and then `kind.buffers`.

    Args:
        kind: which.
    """

    def __init__(self, kind: FileKind) -> None:
        super().__init__()
        self.kind = kind
        planned = {"plan", "desire_state", "desired_curvature"}
        given = {"hidden_state", "pad"}
        if kind.images:
            self.road, self.wide, self.summarizer = Encoder(), Encoder(), Summarizer()
            seen = {n: w for n, w in kind.heads.items() if n not in planned | given}
            self.hydra = Hydra(FEATURE_LEN, seen)
        if kind.buffers:
            others = {n: s for n, s in kind.buffers.items() if n != "features_buffer"}
            tokens = kind.buffers["features_buffer"][1] + (1 if kind.images else 0)
            policy = {n: w for n, w in kind.heads.items() if n in planned}
            self.policy = TemporalPolicy(tokens, others, policy)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Inputs as the contract has them, with n for its 1, to (n, all heads)."""
        names = (*self.kind.images, *self.kind.buffers)
        by_name = dict(zip(names, inputs, strict=True))
        found: dict[str, torch.Tensor] = {}
        dtype = next(self.parameters()).dtype
        if self.kind.images:
            road, wide = (by_name[name].to(dtype) for name in self.kind.images)
            feature = self.summarizer(self.road(road), self.wide(wide))
            found = {**self.hydra(feature), "hidden_state": feature}
        if self.kind.buffers:
            features = by_name["features_buffer"]
            if self.kind.images:
                features = torch.cat([features, found["hidden_state"].unsqueeze(1)], dim=1)
            found |= self.policy(features, by_name)
        rows = inputs[0].shape[0]
        if "pad" in self.kind.heads:
            found["pad"] = torch.zeros(rows, self.kind.heads["pad"], dtype=dtype)
        return torch.cat([found[name] for name in self.kind.heads], dim=1)


class StatefulModel(nn.Module):
    """A supercombo with its queues in the graph, as commaai/openpilot's
    selfdrive/modeld/models/add_history.py puts them around one.

    Args:
        model: of a kind with `img`, `big_img`, `features_buffer` and `desire_pulse`.
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
        """One frame and the queues to the heads (1, all) and the queues after it."""
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


def build(kind: FileKind, seed: int = 0) -> nn.Module:
    """The torch module of a file, with random weights by a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DrivingModel(kind).eval()
        for module in model.modules():
            # torch's own start is so small that three layers leave nothing of the picture.
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        for name, module in model.named_modules():
            # The last layer of a head.
            if name.endswith(".2") and isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
    return StatefulModel(model).eval() if kind.stateful else model
