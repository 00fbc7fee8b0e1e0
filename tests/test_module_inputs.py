"""Modules of others are built with guessed arguments, and an input that they take is found."""

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.module_inputs import first_input, guessed, modules_of, parameters_of, repaired


@dataclass
class TinyConfig:
    """A configuration as nanoGPT and makemore have one."""

    vocab_size: int
    n_embd: int = 8


class _Embeds(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.n_embd)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        return self.table(idx)


class _Grouped(nn.Module):
    """Takes 64 channels at least, in an image of 12 by 12, and a number for each row."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(32, dim)
        self.out = nn.Linear(dim * 144, 4)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(x).flatten(1)) * t[:, None]


class _Handed(_Grouped):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class _Pair(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return q * k


class _Queried(nn.Module):
    """Has a sequence of 24 numbers, which only its message tells."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(24, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, _, _ = x.shape
        return x @ self.weight


def _is_tensor(out: Any) -> bool:
    return isinstance(out, torch.Tensor)


def _found(make: Any) -> list[Any]:
    for module in modules_of(make):
        given, _ = first_input(module, _is_tensor)
        if given is not None:
            return given
    raise AssertionError(f"no input for {make.__name__}")


@pytest.mark.parametrize(
    ("make", "shapes"),
    [
        (_Embeds, [(2, 16)]),
        (_Grouped, [(2, 64, 12, 12), (2,)]),
        (_Handed, [(2, 64, 12, 12), (2,)]),
        (_Queried, [(2, 16, 24)]),
    ],
)
def test_an_input_is_found(make: Any, shapes: list[tuple[int, ...]]):
    given = _found(make)
    assert [tuple(one.shape) for one in given] == shapes


def test_each_argument_is_a_tensor_of_its_own():
    first, second = _found(_Pair)
    assert first is not second


def test_what_hands_its_arguments_on_has_those_of_its_base():
    assert list(parameters_of(_Handed)) == ["dim"]


@pytest.mark.parametrize(
    ("name", "value"),
    [("in_channels", 16), ("num_heads", 4), ("kernel_size", 3), ("dropout", 0.0), ("path", "not")],
)
def test_arguments_are_guessed_from_names(name: str, value: Any):
    parameter = inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    have = guessed(parameter, 16, {})
    assert str(have).startswith(str(value)), "an integer as a path would open a file descriptor"


@pytest.mark.parametrize(
    ("shape", "message", "wanted"),
    [
        ((2, 8, 4, 4), "expected input[2, 8, 4, 4] to have 3 channels, but", (2, 3, 4, 4)),
        ((2, 6), "mat1 and mat2 shapes cannot be multiplied (2x6 and 9x4)", (2, 9)),
        ((2, 8, 4, 4), "shapes cannot be multiplied (2x128 and 32x4)", (2, 8, 2, 2)),
        (
            (2, 5, 6),
            "Given normalized_shape=[4], expected input with shape [*, 4], but got input of"
            " size[2, 5, 6]",
            (2, 5, 4),
        ),
        ((2, 6), "not enough values to unpack (expected 3, got 2)", (2, 16, 6)),
        ((2, 6), "Wrong shape: expected 1 dims. Received 2-dim tensor.", (2,)),
        ((2, 6), "The size of tensor a (6) must match the size of tensor b (5) at", (2, 5)),
    ],
)
def test_messages_say_what_a_module_takes(shape: Any, message: str, wanted: Any):
    assert wanted in [tuple(given[0].shape) for given in repaired([torch.randn(shape)], message)]


def test_an_index_is_made_where_one_is_asked_for():
    message = "Expected tensor for argument #1 'indices' to have one of the following: Long, Int"
    made = list(repaired([torch.randn(2, 3)], message))
    assert made[-1][0].dtype == torch.int64
