"""What a script writes to between a call and its backward pass, unseen by torch."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError
from tpuport.foundation.interop import backend
from tpuport.model.parity.saved_inputs import Saved
from tpuport.model.program_cache import BoundCall
from tpuport.tracing.core.arguments import argument_name
from tpuport.tracing.state.module_state import StateTree

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Kept(NamedTuple):
    """A tensor that eager PyTorch keeps for its backward pass, as it was at the end of a call.

    Attributes:
        what: words for it.
        tensor: the script's tensor.
        then: its value at the end of the call.
        instead: what the script can do instead of writing to it.
        by_sign: whether only where it is positive counts.
    """

    what: str
    tensor: torch.Tensor
    then: jax.Array
    instead: str
    by_sign: bool = False


def kept_inputs(call: BoundCall, saved: Iterable[tuple[str | int, torch.Tensor]]) -> Iterator[Kept]:
    """Yield what eager keeps of a call's inputs, by the number of an argument or a parameter's
    name.
    """
    for key, tensor in saved:
        if isinstance(key, str):
            then, what = call.state.get(key), f"the parameter {key!r}"
            instead = "write to it before the call or after the backward pass"
        else:
            then, what = call.given.values[key], argument_name(call.given.paths[key])
            instead = (
                "write out of place (x = x.masked_fill(mask, 0), not x.data.masked_fill_), or"
                " before the call"
            )
        if then is not None:
            yield Kept(what, tensor, then, instead)


def kept_results(
    saved: Saved, values: Callable[[], dict[Any, Any]], out: Any, left: Mapping[str, torch.Tensor]
) -> list[Kept]:
    """Return what eager keeps of the results of a call, and of the tensors that it leaves.

    Args:
        saved: what eager keeps.
        values: gives the program's, by the number of a result or the name of a left tensor.
        out: what the script gets.
        left: the tensors with a graph that it finds in the module.
    """
    if not (saved.results or saved.left):
        return []
    results, arrays = pytree.flatten(out)[0], values()
    # A number that eager gives and a program counts as a tensor would move the results behind it.
    found: dict[Any, Any] = {}
    if saved.total == len(results):
        found |= {index: results[index] for index in saved.results}
    found |= {name: left[name] for name in saved.left if name in left}
    with torch._C.DisableTorchFunction():
        return [
            # Without the graph, of which what is kept here is a part; in the same memory. One
            # without a graph may yet be put into that of a buffer.
            Kept(
                _result(place, saved.total),
                tensor.data if tensor.requires_grad else tensor,
                then,
                _OUT_OF_PLACE,
                place in saved.signs,
            )
            for place, tensor in found.items()
            if isinstance(tensor, torch.Tensor)
            and isinstance(then := arrays.get(place), jax.Array)
            and _is_on_cpu(then)
        ]


def kept_buffers(saved: Saved, call: BoundCall, tree: StateTree) -> list[Kept]:
    """Return what eager keeps of the buffers that a call only reads.

    A kernel that writes to one, such as a running mean, does so past torch's version counter.
    """
    changed = call.compiled.outcome.changed
    names = [name for name in saved.left if name in tree.registered and name not in changed]
    instead = "write to it before the call or after the backward pass"
    with torch._C.DisableTorchFunction():
        return [
            Kept(f"the buffer {name!r}", tree.leaves[name].data, then, instead)
            for name in names
            if isinstance(then := call.state.get(name), jax.Array) and _is_on_cpu(then)
        ]


_OUT_OF_PLACE = "write out of place (y = y * 0.5, not y.data.mul_), or after the backward pass"


def _result(place: str | int, count: int) -> str:
    if isinstance(place, str):
        return f"the attribute {place!r}"
    return "the result" if count == 1 else f"result {place}"


def refuse_rewritten(name: str, kept: Iterable[Kept]) -> None:
    """Refuse a backward pass if what eager PyTorch keeps for it has other values now.

    torch raises at a write that its version counter sees, but `.data` writes past it, and eager's
    gradient is then taken partly at the new values. The comparison needs both values on the host,
    so it is made where programs run on a CPU, of calls that were compared with eager PyTorch.

    Args:
        name: the class of the module that was called.
        kept: what eager keeps.

    Raises:
        PortError: one of it was written to.
    """
    for one in kept:
        if _unchanged(one):
            continue
        raise PortError(
            f"{one.what} of a call of {name} was written to, by .data or in place, before the"
            " backward pass: eager PyTorch takes the gradient partly at the new values, or raises,"
            " and a program takes it at those of the call",
            code="TPU406",
            remedy=f"{one.instead}; for eager PyTorch's own gradient leave {name} and the layers in"
            f" it that use it to eager PyTorch: tpuport run --eager {name} --eager LAYER",
        )


def _unchanged(kept: Kept) -> bool:
    tensor, value = kept.tensor, kept.then
    if not _is_on_cpu(value) or tensor.layout != torch.strided:
        return True
    dtype = backend.jax_dtype(tensor.dtype)
    if value.dtype != dtype or value.ndim != tensor.ndim:
        return True
    with torch._C.DisableTorchFunction():
        now = tensor.detach()
        # Of a length that varies the program got the longest.
        then = backend.to_torch(value, now.dtype)[tuple(slice(size) for size in now.shape)]
        if kept.by_sign:
            return bool(torch.equal(now <= 0, then <= 0))
        if value.dtype.itemsize < now.element_size():  # 64 bits are kept as what a program has
            now = now.to(backend.torch_dtype(value.dtype)).to(now.dtype)
        return bool(torch.equal(_bits(now), _bits(then)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers as integers, of which -0.0 and NaN are like any others."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_BITS[tensor.element_size()])


def _is_on_cpu(value: jax.Array) -> bool:
    return value.is_fully_addressable and all(one.platform == "cpu" for one in value.devices())
