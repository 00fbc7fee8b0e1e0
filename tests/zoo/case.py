"""One model of a zoo: how it is built, and what it is called with."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import diffusers
import torch
import transformers
from torch import nn


@dataclass(frozen=True)
class Case:
    """A small model and its arguments.

    Attributes:
        name: Name in the test id: the class, and what is particular about the case.
        build: Makes the model and the keyword arguments of its forward; takes changes of the
            configuration.
        grads: Compare the gradients of all trainable parameters as well.
        rtol: Tolerance relative to the largest element of an output.
    """

    name: str
    build: Callable[..., tuple[nn.Module, dict[str, Any]]]
    grads: bool = False
    rtol: float = 1e-4

    def __str__(self) -> str:
        return self.name

    def make(self, **changes: Any) -> tuple[nn.Module, dict[str, Any]]:
        """The model in evaluation mode and its arguments, the same at each call.

        `changes` to its configuration.
        """
        torch.manual_seed(0)
        model, kwargs = self.build(**changes)
        return model.eval(), kwargs


@torch.no_grad()
def fill(model: nn.Module) -> nn.Module:
    """Draw every weight: many models start with gates and output layers of zero, which hide errors.

    Matrices get the size that keeps activations near 1; vectors (biases, scales of norms) move a
    little.
    """
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=(parameter.shape[0] / parameter.numel()) ** 0.5)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def keep(
    *lengths: int, size: int, left: bool = False, dtype: torch.dtype = torch.long
) -> torch.Tensor:
    """A padding mask, one row per length.

    1 at the first `length` places, or at the last with `left`.

    Returns:
        Tensor of shape (len(lengths), size).
    """
    places = torch.arange(size)
    if left:
        places = places.flip(0)
    return (places[None] < torch.tensor(lengths)[:, None]).to(dtype)


def diffusers_case(
    cls: str,
    config: dict[str, Any],
    inputs: Callable[[], dict[str, Any]],
    note: str = "",
    **options: Any,
) -> Case:
    """The case of a diffusers class with this configuration.

    `note` tells two of one class apart.
    """
    name = f"{cls}-{note}" if note else cls
    return Case(name, partial(_diffusers_model, cls, config, inputs), **options)


def _diffusers_model(
    cls: str, config: dict[str, Any], inputs: Callable[[], dict[str, Any]], **changes: Any
) -> tuple[nn.Module, dict[str, Any]]:
    return fill(getattr(diffusers, cls)(**config | changes)), inputs()


def times(*values: float) -> torch.Tensor:
    """Diffusion times, one per sample."""
    return torch.tensor(values)


def rotary(length: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of rotary position embeddings, each of shape (length, dim)."""
    angle = torch.outer(torch.arange(float(length)), 0.1 ** torch.arange(dim // 2))
    angle = angle.repeat_interleave(2, dim=1)
    return angle.cos(), angle.sin()


def transformers_case(
    cls: str,
    config: dict[str, Any],
    inputs: Callable[[], dict[str, Any]],
    note: str = "",
    **options: Any,
) -> Case:
    """The case of a transformers class with this configuration; `note` as above."""
    name = f"{cls}-{note}" if note else cls
    return Case(name, partial(_transformers_model, cls, config, inputs), **options)


def _transformers_model(
    cls: str, config: dict[str, Any], inputs: Callable[[], dict[str, Any]], **changes: Any
) -> tuple[nn.Module, dict[str, Any]]:
    made = getattr(transformers, cls)
    return fill(made(made.config_class(**config | changes))), inputs()
