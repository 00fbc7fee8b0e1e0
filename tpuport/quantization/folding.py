"""Orders of channels that move from a layer's input into the layers in front of it.

DuQuant puts the channels of a layer's input in another order. Where they come from quantized
layers, and nothing between looks at more than one channel at a time, those layers can make them in
that order: their rows are exchanged once, on the host, and the program gathers nothing.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from tpuport.foundation import pytree
from tpuport.foundation.pytree.clone import clone_module
from tpuport.quantization.freeze import with_layers
from tpuport.quantization.layer import FrozenLayer, QuantizedLinear
from tpuport.quantization.passes import arguments_of, deviation_of
from tpuport.quantization.transforms import Permute

_aten = torch.ops.aten
# Besides pointwise operations, what leaves channels in the last dim if that keeps its size.
_SAME_LAST_DIM = {
    _aten.view.default, _aten._unsafe_view.default, _aten.alias.default, _aten.detach.default,
    _aten.clone.default, _aten._to_copy.default, _aten.unsqueeze.default,
}  # fmt: skip
# Products of codes are exact, and sums are taken in the same order.
_EQUAL = 1e-5
_NONE: frozenset[str] = frozenset()


def fold_orders(
    model: torch.nn.Module, layers: Mapping[str, FrozenLayer], batch: Any
) -> tuple[dict[str, FrozenLayer], dict[str, tuple[str, ...]]]:
    """Return layers without the orders that layers in front of them can make.

    Proved by comparison: if the results of eager PyTorch on the batch then differ, nothing is
    folded.

    Args:
        model: The float model.
        layers: Its frozen layers by name.
        batch: The arguments of a call.

    Returns:
        All layers, and by name of a layer whose input is no longer reordered those in front of it.
    """
    reading = {name for name, one in layers.items() if _begins_with_order(one)}
    if not reading:
        return dict(layers), {}
    follower = _Follower(layers, reading)
    before = _results(model, layers, batch, follower)
    pairs = dict(follower.pairs())
    made = dict(layers)
    for name, sources in pairs.items():
        first: Any = layers[name].get_submodule("inputs.0")
        for source in sources:
            made[source] = _with_rows(made[source], first.order)
        made[name] = _without_order(made[name])
    if pairs and deviation_of([before], [_results(model, made, batch)]).relative > _EQUAL:
        return dict(layers), {}
    return made, pairs


def _begins_with_order(layer: FrozenLayer) -> bool:
    """Return whether the first that a layer does is to put its input in another order."""
    transforms = list(layer.inputs) if isinstance(layer, QuantizedLinear) else []
    return bool(transforms) and isinstance(transforms[0], Permute)


def _with_rows(layer: Any, order: torch.Tensor) -> QuantizedLinear:
    """Return a layer whose output features are in an order."""
    held = dict(layer.named_buffers(recurse=False))
    of_outputs = {name: dims[0] for name, dims in layer.weight_dims.items()}
    moved = {name: held[name].index_select(dim, order) for name, dim in of_outputs.items()}
    return _replaced(layer, {**held, **moved}, layer.inputs)


def _without_order(layer: Any) -> QuantizedLinear:
    return _replaced(layer, dict(layer.named_buffers(recurse=False)), layer.inputs[1:])


def _replaced(layer: Any, held: Any, inputs: Any) -> QuantizedLinear:
    made = QuantizedLinear(layer.scheme, held, inputs, layer.restore)
    made._of_weight = layer._of_weight
    return made.train(layer.training)


@torch.no_grad()
def _results(
    model: torch.nn.Module,
    layers: Mapping[str, FrozenLayer],
    batch: Any,
    follower: "_Follower | None" = None,
) -> Any:
    """Return the results of eager PyTorch, which changes neither the model nor random numbers."""
    frozen = clone_module(with_layers(model, layers), _kept)[0]
    args, kwargs = arguments_of(batch)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if follower is None:
            return frozen(*args, **kwargs)
        follower.watch(frozen)
        with follower:
            found = frozen(*args, **kwargs)
    follower.give_up(pytree.flatten(found, shared=False)[0])
    return found


def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """Return a parameter as it is, and a copy of a buffer, which a call may write."""
    return tensor if isinstance(tensor, torch.nn.Parameter) else tensor.clone()


class _Follower(TorchDispatchMode):
    """Follows the channels of layers' outputs to the inputs of others, in one call of a model.

    `readers` has by layer the outputs that its input comes from, and `refused` the layers whose
    outputs went through something that looks at several channels, or to several layers.
    """

    def __init__(self, layers: Mapping[str, FrozenLayer], reading: set[str]) -> None:
        super().__init__()
        self._layers, self._reading = layers, reading
        self._sources: Any = WeakIdKeyDictionary()
        self._inside = False
        self._readers: dict[str, frozenset[str]] = {}
        self._refused: set[str] = set()

    def watch(self, frozen: torch.nn.Module) -> None:
        """Note what goes into the layers of a model, and what comes out of them."""
        for name in self._layers:
            module = frozen.get_submodule(name)
            module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
            module.register_forward_hook(self._leaving(name))

    def give_up(self, leaves: Any) -> None:
        """Refuse the layers whose outputs are among the results."""
        for one in leaves:
            self._refused |= self._of(one)

    def pairs(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Yield layers whose input can come in their order, and the layers that make it."""
        for name, sources in self._readers.items():
            others = set().union(*(one for key, one in self._readers.items() if key != name))
            if sources and not sources & (self._refused | others):
                yield name, tuple(sorted(sources))

    def _entering(self, name: str) -> Any:
        def enter(module: Any, args: Any, kwargs: Any) -> None:
            del module
            sources = self._of(args[0] if args else kwargs.get("input"))
            known = self._readers.setdefault(name, sources) if name in self._reading else _NONE
            if sources != known:
                self._refused |= sources | known
            self._inside = True

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: Any, args: Any, output: Any) -> None:
            del args
            self._inside = False
            # After the product a rotation back mixes rows, so they have to be where they are.
            if isinstance(module, QuantizedLinear) and not len(module.restore):
                self._sources[output] = frozenset((name,))

        return leave

    def _of(self, value: Any) -> frozenset[str]:
        """Return the layers from which a tensor's channels come."""
        return self._sources.get(value, _NONE) if isinstance(value, torch.Tensor) else _NONE

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self._inside:
            return out
        leaves = tree_leaves((args, kwargs))
        given = [one for one in leaves if isinstance(one, torch.Tensor)]
        sources = frozenset[str]().union(*(self._of(one) for one in given))
        if sources and self._keeps_channels(func, given, out):
            self._sources[out] = sources
        else:
            self._refused |= sources
        return out

    def _keeps_channels(self, func: Any, given: list[torch.Tensor], out: Any) -> bool:
        """Return whether each channel of a result is made of that channel alone."""
        if not isinstance(out, torch.Tensor) or func._schema.is_mutable or not out.dim():
            return False
        if func not in _SAME_LAST_DIM and torch.Tag.pointwise not in func.tags:
            return False
        return all(
            one.shape[-1] == out.shape[-1] if self._of(one) else one.shape[-1:] in ((), (1,))
            for one in given
        )
