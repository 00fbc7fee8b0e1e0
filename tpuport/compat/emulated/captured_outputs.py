"""Hooks that transformers registers at the first call that asks for hidden states.

They have to be on the model before the call, because a copy of the model is traced.
"""

import sys

import torch


def prepare(module: torch.nn.Module) -> None:
    """Register the output-capturing hooks of the models in a module now."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    models = sys.modules.get("transformers.modeling_utils")
    if capturing is None or models is None:
        return
    for one in module.modules():
        if isinstance(one, models.PreTrainedModel):
            capturing.maybe_install_capturing_hooks(one)
