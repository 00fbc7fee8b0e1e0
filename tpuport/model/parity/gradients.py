"""Gradients of a port beside those of eager PyTorch."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.foundation import pytree
from tpuport.foundation.interop import backend
from tpuport.model.parity.call import Call
from tpuport.model.parity.structure import Pair, comparable
from tpuport.model.parity.verify import Reference
from tpuport.reports.records import Kind
from tpuport.tracing.core.export import to_torch
from tpuport.tracing.scan_layers import stacked_params


def projection(shape: Sequence[int], index: int) -> np.ndarray:
    """Return fixed random weights for an output, so that one gradient checks all its elements."""
    draw = np.asarray(np.random.default_rng(index).standard_normal(tuple(shape)))
    return np.asarray(draw / max(draw.size, 1) ** 0.5, np.float32)


def projected(out: Any) -> list[torch.Tensor]:
    """Return a weighted sum for each result that has a graph."""
    return [
        (leaf * torch.from_numpy(projection(leaf.shape, i)).to(leaf.dtype)).sum()
        for i, leaf in enumerate(pytree.flatten(out)[0])
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf.is_floating_point()
    ]


def of_reference(found: Reference) -> dict[str, torch.Tensor | None]:
    """Return eager's gradients of `projected`, by parameter; none if no result has a graph."""
    return {} if found.module is None else of_sums(projected(found.out), found.module)


def of_sums(sums: list[torch.Tensor], module: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """Return the gradients of sums by parameter, None for one that they do not depend on."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not sums or not trained:
        return {}
    made = torch.autograd.grad(sums, list(trained.values()), allow_unused=True)
    return dict(zip(trained, made, strict=True))


def of_port(ported: Any, call: Call, names: Collection[str]) -> dict[str, jax.Array]:
    """Return the port's gradients of the sums of `projected`, by parameter."""
    rest = {name: value for name, value in call.state.items() if name not in names}

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        result, _ = ported.apply(
            params, rest, call.key, *call.args, method=call.method, **call.kwargs
        )
        leaves = enumerate(pytree.flatten(result, leaf=comparable)[0])
        floats = ((i, leaf) for i, leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating))
        sums = (jnp.sum(v * projection(v.shape, i).astype(v.dtype)) for i, v in floats)
        return sum(sums, jnp.zeros(()))

    with ported._precision_scope():
        made = jax.jit(jax.grad(loss))({name: call.state[name] for name in names})
    return stacked_params.unstack(made)


def paired(want: Mapping[str, Any], have: Mapping[str, Any]) -> list[tuple[Kind, Pair]]:
    """Pair gradients by name; None on one side is like zeros on the other."""
    made = (_pair(f"grad.{name}", want.get(name), have.get(name)) for name in have)
    return [("gradient", pair) for pair in made if pair is not None]


def _pair(path: str, want: Any, have: Any) -> Pair | None:
    if want is not None and have is not None:
        if isinstance(have, jax.Array):
            have = have.astype(backend.jax_dtype(want.dtype))
        return Pair(path, want, have)
    one = want if have is None else have
    plain = None if one is None else to_torch(one).detach()
    if plain is None or not plain.any():
        return None
    size = float(plain.abs().max())
    there, here = (f"one up to {size:.1e}", "no gradient (None)")
    said = (here, there) if have is None else (there, here)
    return Pair(path, problem=f"{said[0]} where eager PyTorch gives {said[1]}")
