"""Hooks of torch on the tensors that autograd saves."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def without_saved_tensors_hooks() -> Iterator[None]:
    """Take the hooks of `torch.autograd.graph.saved_tensors_hooks` away, and put them back.

    A program keeps arrays for its backward pass that are no tensors, and to trace it and to compare
    it with eager PyTorch saves tensors that no later call does. `torch.utils.checkpoint` counts
    what is saved: a program inside of it keeps its own.
    """
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    taken: list[Any] = []
    while (hooks := autograd._top_saved_tensors_default_hooks(False)) is not None:
        taken.append(hooks)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for hooks in reversed(taken):
            autograd._push_saved_tensors_default_hooks(*hooks)
