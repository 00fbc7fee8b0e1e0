"""The number of attention heads in the output of a projection."""

from typing import Any

import torch

_WIDTHS = ("head_dim", "attention_head_size", "dim_head", "head_size", "d_kv")
_COUNTS = ("num_heads", "num_attention_heads", "heads", "n_heads", "n_head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def heads_of(module: torch.nn.Module, name: str, outs: int) -> int | None:
    """Return the number of heads in the output of an attention module's projection.

    Args:
        module: attention module, whose attributes name the width or the number of its heads.
        name: name of the projection, to tell keys and values from queries.
        outs: width of the projection's output.

    Returns:
        The number of heads; None if the module names neither.
    """
    width = _first(module, _WIDTHS)
    if width and outs % width == 0:
        return outs // width
    counts = _COUNTS if "q" in name else (*_KEY_COUNTS, *_COUNTS)
    return _first(module, counts)


def _first(module: torch.nn.Module, names: tuple[str, ...]) -> int | None:
    holders: list[Any] = [module, getattr(module, "config", None)]
    for holder in holders:
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int) and value > 0:
                return value
    return None
