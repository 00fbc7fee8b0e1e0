"""What `torch.compile` returns for a module: a module around it, whose calls are the module's."""

from collections.abc import Sized
from typing import Any

import torch

_OWN = frozenset({"_orig_mod", "_is_ready", "__dict__"})


class OptimizedModule(torch.nn.Module):
    """Holds a module as torch's class of this name does, and compiles nothing.

    Scripts see that it is there: the names of its parameters begin with `_orig_mod.`, and so do the
    keys of checkpoints; some ask for `_orig_mod`. Source: torch/_dynamo/eval_frame.py.
    """

    _orig_mod: torch.nn.Module

    def __init__(self, module: torch.nn.Module) -> None:
        object.__setattr__(self, "_is_ready", False)
        super().__init__()
        self._modules["_orig_mod"] = module
        self._is_ready = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module, which is the program then; hooks of this one run around it."""
        hooks = (self._forward_hooks, self._forward_pre_hooks, self._backward_hooks)
        if any((*hooks, self._backward_pre_hooks)):
            return super().__call__(*args, **kwargs)
        return self._orig_mod(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._orig_mod(*args, **kwargs)

    def __len__(self) -> int:
        if isinstance(self._orig_mod, Sized):
            return len(self._orig_mod)
        raise TypeError(f"{type(self._orig_mod).__name__} does not support len()")

    @property
    def training(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._orig_mod.training

    @training.setter
    def training(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        # The constructor of Module sets a first value, which is none of the held module.
        if self._is_ready:
            self._orig_mod.training = value

    def __getattr__(self, name: str) -> Any:
        if "_modules" not in self.__dict__:
            raise AttributeError(name)  # a copy that has no state yet
        held = self._modules["_orig_mod"]
        return held if name == "_orig_mod" else getattr(held, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or hasattr(type(self), name) or not self._is_ready:
            super().__setattr__(name, value)
        else:
            setattr(self._orig_mod, name, value)

    def __delattr__(self, name: str) -> None:
        if name in _OWN or hasattr(type(self), name):
            super().__delattr__(name)
        else:
            delattr(self._orig_mod, name)

    def __dir__(self) -> list[str]:
        return [*dict.fromkeys([*dir(self._orig_mod), *super().__dir__()])]
