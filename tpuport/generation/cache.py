"""A key-value cache of bounded length, for a loop whose shapes stay the same."""

from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
    StaticLayer,
)


class BoundedLayer(StaticLayer):
    """A layer that holds `max_cache_len` positions; new ones are written where the count is.

    A layer with a sliding window holds all positions too, and its mask hides those outside of the
    window: a ring buffer would need the count as a Python number.
    """

    def __init__(self, max_cache_len: int, *, is_sliding: bool) -> None:
        super().__init__(max_cache_len)
        self.is_sliding = is_sliding

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the buffers, in the shapes and dtypes of the first keys and values."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.keys, self.values = self._empty(key_states), self._empty(value_states)
        self.is_initialized = True

    def _empty(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, _, width = states.shape
        return states.new_zeros((batch, heads, self.max_cache_len, width))


def bounded_cache(config: Any, length: int) -> Cache:
    """Return an empty cache for a model's decoder, of this many positions."""
    text = config.get_text_config(decoder=True)
    cache = StaticCache(config=text, max_cache_len=length)
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, StaticLayer):
            cache.layers[index] = BoundedLayer(length, is_sliding=bool(layer.is_sliding))
    if config.is_encoder_decoder:
        return EncoderDecoderCache(cache, DynamicCache(config=text))
    return cache
