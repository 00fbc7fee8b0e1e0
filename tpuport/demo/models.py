"""The two models of the demo, with realistic inputs, and their comparisons on plain torchax."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.models.transformers.transformer_hunyuan_video15 import (
    HunyuanVideo15Transformer3DModel,
)

from tpuport.demo.plain_torchax import Difference, run_plain
from tpuport.demo.planner import BatchFeature, DiffusionPlanner


@dataclass(frozen=True)
class DemoModel:
    """A model with example inputs.

    Attributes:
        title: The name of the model's class.
        story: A sentence about the model.
        model: The module, with random weights.
        inputs: Named input tensors.
        methods: The names of the methods to port.
        bind: Makes the arguments of a call from the inputs.
        differences: Finds silent differences of plain torchax from eager PyTorch.
    """

    title: str
    story: str
    model: torch.nn.Module
    inputs: dict[str, torch.Tensor]
    methods: tuple[str, ...]
    bind: Callable[[dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    differences: Callable[["DemoModel"], list[Difference]]

    def call(
        self, model: Any, method: str = "forward", inputs: dict[str, Any] | None = None
    ) -> Any:
        """Call a method of the model, a port or a copy of it, on the example's inputs or others."""
        args, kwargs = self.bind(self.inputs if inputs is None else inputs)
        return (model if method == "forward" else getattr(model, method))(*args, **kwargs)


def make_video_transformer(seed: int = 0) -> DemoModel:
    """Make a small HunyuanVideo-1.5 transformer of diffusers for text to video: 2 of 54 blocks.

    The prompts are padded to one length, the second text encoder is empty for the first prompt, and
    the image embedding is zeros, as the pipeline passes it when there is no image.
    """
    torch.manual_seed(seed)
    model = HunyuanVideo15Transformer3DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        num_layers=2,
        text_embed_dim=96,
        text_embed_2_dim=48,
        image_embed_dim=64,
        rope_axes_dim=(8, 12, 12),
    ).eval()
    inputs = {
        "hidden_states": torch.randn(2, 65, 4, 12, 20),
        "timestep": torch.full((2,), 981.0),
        "encoder_hidden_states": torch.randn(2, 32, 96),
        "encoder_attention_mask": torch.arange(32)[None] < torch.tensor([[9], [27]]),
        "encoder_hidden_states_2": torch.randn(2, 16, 48),
        "encoder_attention_mask_2": torch.arange(16)[None] < torch.tensor([[0], [6]]),
        "image_embeds": torch.zeros(2, 25, 64),
    }
    return DemoModel(
        title=type(model).__name__,
        story=(
            "The HunyuanVideo-1.5 transformer of diffusers: the real class with 2 of its 54 blocks,"
            " narrow, random weights. Two padded prompts, text to video."
        ),
        model=model,
        inputs=inputs,
        methods=("forward",),
        bind=lambda inputs: ((), inputs),
        differences=_video_differences,
    )


def make_planner(seed: int = 0) -> DemoModel:
    """Make the diffusion planner in training mode, with one sample that has no context."""
    torch.manual_seed(seed)
    model = DiffusionPlanner(depth=2)
    size, length = 8, 48
    padding = torch.tensor([[length], [30], [0], [12], [25], [7], [41], [19]])
    inputs = {
        "context": torch.randn(size, length, 384),
        "context_mask": torch.arange(length)[None] >= padding,
        "status": torch.randn(size, 8) * 3 + 1,
        "action": torch.rand(size, model.horizon, 3) * torch.tensor([40.0, 8.0, 0.6]),
        "valid": torch.arange(model.horizon)[None]
        < torch.tensor([[8], [8], [5], [8], [8], [3], [8], [8]]),
    }
    return DemoModel(
        title=type(model).__name__,
        story=(
            "A diffusion planner written the way research code is (tpuport/demo/planner.py):"
            " in-place edits, boolean masks, .item(), a cache that grows, noise drawn in forward,"
            " buffers that training updates."
        ),
        model=model,
        inputs=inputs,
        methods=("forward", "get_action"),
        bind=lambda inputs: ((BatchFeature(inputs),), {}),
        differences=_planner_differences,
    )


def _video_differences(example: DemoModel) -> list[Difference]:
    names = ("encoder_hidden_states", "timestep", "encoder_attention_mask")
    values = [example.inputs[name] for name in names]

    def refine(model: Any, text: torch.Tensor, step: torch.Tensor, mask: torch.Tensor) -> Any:
        return model.context_embedder(text, step, mask)

    with torch.no_grad():
        eager = refine(example.model, *values)
    (plain,) = run_plain(example.model, refine, *values)
    return [
        Difference(
            "NaN in the refined prompt, where padding attends to nothing",
            eager=_share_of_nan(eager),
            plain=_share_of_nan(plain),
        )
    ]


def _planner_differences(example: DemoModel) -> list[Difference]:
    model = copy.deepcopy(example.model)
    assert isinstance(model, DiffusionPlanner)
    status, action, mask = (example.inputs[name] for name in ("status", "action", "context_mask"))
    queries = torch.zeros(*action.shape[:2], model.width)
    context = torch.randn(*mask.shape, model.width)

    def step(model: DiffusionPlanner, status: torch.Tensor) -> Any:
        model.encode_status(status)
        return model.status_norm.running_mean

    def noise(model: DiffusionPlanner, action: torch.Tensor) -> Any:
        return model.add_noise(action)[1]

    def attend(model: Any, x: Any, context: Any, mask: Any) -> Any:
        return model.blocks[0].context(x, model.rope, context, mask)

    (plain_mean,) = run_plain(model, step, status)
    plain_noise = run_plain(model, noise, action, times=2)
    (plain_attended,) = run_plain(model, attend, queries, context, mask)
    assert model.status_norm.running_mean is not None
    mean = model.status_norm.running_mean.clone()
    with torch.no_grad():
        eager_mean = step(model, status)
        eager_noise = [noise(model, action) for _ in range(2)]
        eager_attended = attend(model, queries, context, mask)
    return [
        Difference(
            "BatchNorm's running mean after a training step",
            eager=_moved(mean, eager_mean),
            plain=_moved(mean, plain_mean),
        ),
        Difference(
            "the noise of two calls of one jitted step",
            eager=_same(*eager_noise),
            plain=_same(*plain_noise),
        ),
        Difference(
            "NaN in attention, where a sample has no context",
            eager=_share_of_nan(eager_attended),
            plain=_share_of_nan(plain_attended),
        ),
    ]


def _share_of_nan(value: torch.Tensor) -> str:
    share = value.isnan().double().mean().item()
    return "none" if share == 0 else f"{math.ceil(share * 100)}% of it"


def _moved(before: torch.Tensor, after: torch.Tensor) -> str:
    return "as before" if torch.equal(before, after) else "updated"


def _same(first: torch.Tensor, second: torch.Tensor) -> str:
    return "the same" if torch.equal(first, second) else "different"
