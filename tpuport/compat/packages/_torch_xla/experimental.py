"""`torch_xla.experimental`: scan, layers in a row, pure functions, attention, eager mode."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tpuport.compat.packages._torch_xla.state import STATE
from tpuport.foundation.errors import UsageError
from tpuport.tracing.core.errors import port_error

# Scores of keys that a query must not see, as in jax's kernel (and so in torch_xla's).
DEFAULT_MASK_VALUE = -0.7 * float(torch.finfo(torch.float32).max)

# From here on, each function is named and called as in torch_xla.


def eager_mode(enable: bool) -> None:
    """Remember the mode, for `is_eager_mode`: calls of modules are programs in either."""
    STATE.is_eager = enable


def is_eager_mode() -> bool:
    """Return what `eager_mode` was last told."""
    return STATE.is_eager


@contextlib.contextmanager
def eager_mode_context(enable: bool) -> Iterator[bool]:
    """Remember the mode inside."""
    before = STATE.is_eager
    eager_mode(enable)
    try:
        yield before
    finally:
        eager_mode(before)


def scan(
    fn: Callable[..., Any],
    init: Any,
    xs: Any,
    partition_fn: Any = None,
    is_fn_pure: bool = False,
) -> tuple[Any, Any]:
    """Call a function on each slice of the leading dim, with a carry; stack what it returns.

    In a program the loop is unrolled.
    """
    del partition_fn, is_fn_pure
    leaves, spec = pytree.tree_flatten(xs)
    if not leaves:
        raise UsageError("torch_xla scan: xs has no tensors. What to do: give it one to scan over")
    lengths = {leaf.shape[0] for leaf in leaves}
    if len(lengths) != 1:
        raise UsageError(f"torch_xla scan: the leading dims of xs differ: {sorted(lengths)}")
    carry, found = init, []
    (length,) = lengths
    for index in range(length):
        # The function may write to the carry, which earlier results may share.
        carry = pytree.tree_map_only(torch.Tensor, torch.clone, carry)
        carry, y = fn(carry, pytree.tree_unflatten([leaf[index] for leaf in leaves], spec))
        found.append(y)
    if not found:
        raise UsageError(
            "torch_xla scan: the leading dim of xs is 0, so nothing says what to stack"
        )
    return carry, pytree.tree_map(lambda *all_ys: _stacked(all_ys), *found)


def _stacked(values: tuple[Any, ...]) -> Any:
    return torch.stack(values) if isinstance(values[0], torch.Tensor) else values[0]


def scan_layers(
    layers: Iterable[torch.nn.Module],
    input_data: Any,
    partition_fn: Any = None,
    is_layer_pure: bool = False,
) -> Any:
    """Call layers in a row. In a program, layers that are one function become one loop."""
    del partition_fn, is_layer_pure
    for layer in layers:
        input_data = layer(input_data)
    return input_data


def assume_pure(fn: Callable[..., Any], *, add_rng_seed_argument: bool = False) -> Any:
    """Return the function: programs are traced once for each signature in any case."""
    if add_rng_seed_argument:
        raise port_error(
            "assume_pure(add_rng_seed_argument=True) is not served by tpuport",
            remedy="leave it out: random numbers in a program are fresh at each call",
        )
    return fn


class PureModule(torch.nn.Module):
    """A module that only calls another one."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self._module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self._module(*args, **kwargs)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    q_segment_ids: torch.Tensor | None = None,
    kv_segment_ids: torch.Tensor | None = None,
    sm_scale: float = 1.0,
    *,
    ab: torch.Tensor | None = None,
    partition_spec: Any = None,
    mesh: Any = None,
) -> torch.Tensor:
    """Compute the attention of q [B, H, L, D] over k and v [B, H, S, D].

    As in jax's kernel the bias is added before the scale, `causal` aligns the first query and the
    first key, and a query that sees no key sees all of them.
    """
    del partition_spec, mesh  # the partitioner spreads it as it spreads q
    mask = None
    if causal:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    if q_segment_ids is not None and kv_segment_ids is not None:
        same = (q_segment_ids[:, :, None] == kv_segment_ids[:, None, :])[:, None]
        mask = same if mask is None else mask & same
    bias = None if ab is None else ab.to(q.dtype) * sm_scale
    if mask is not None:
        unseen = torch.zeros(mask.shape, dtype=q.dtype, device=q.device)
        unseen = unseen.masked_fill(~mask, DEFAULT_MASK_VALUE)
        bias = unseen if bias is None else bias + unseen
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, bias, scale=sm_scale)
