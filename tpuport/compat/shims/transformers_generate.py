"""transformers' `generate` inside `porting()`: two programs, whatever the number of tokens."""

import functools
import importlib
from typing import Any

import torch

from tpuport.compat.emulated import programs
from tpuport.foundation.patching.shim import Replacement, Shim
from tpuport.generation.generate import is_transformers


class TransformersGenerate(Shim):
    """The loop over tokens of a model on the accelerator."""

    TARGET = "transformers.GenerationMixin.generate"
    REASON = "its cache grows, so that each new token would be a program of its own"
    REFERENCE = "the same call in eager PyTorch, with which the first one is compared"
    MODULE = "transformers.generation.utils"

    def replacements(self) -> list[Replacement]:
        mixin = importlib.import_module(self.MODULE).GenerationMixin
        original = mixin.generate

        @functools.wraps(original)
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_ours = kwargs.get("custom_generate") is None and is_transformers(self)
            if not is_ours or not programs.becomes_program(self, "generate"):
                return original(self, *args, **kwargs)
            with torch.no_grad():
                return programs.attempt(self, "generate", original, args, kwargs)

        return [Replacement(mixin, "generate", generate)]
