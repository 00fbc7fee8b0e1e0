"""What a script writes to between a call and its backward pass, unseen by torch."""

from collections.abc import Iterable

import jax
import torch

from tpuport.foundation.errors import PortError
from tpuport.foundation.interop import backend
from tpuport.model.program_cache import BoundCall
from tpuport.tracing.core.arguments import argument_name

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_rewritten(
    call: BoundCall, name: str, saved: Iterable[tuple[str | int, torch.Tensor]]
) -> None:
    """Refuse a backward pass if what eager PyTorch keeps for it has other values now.

    torch raises at a write that its version counter sees, but `.data` writes past it, and eager's
    gradient is then taken partly at the new values. The comparison needs both values on the host,
    so it is made where programs run on a CPU, of calls that were compared with eager PyTorch.

    Args:
        call: the call.
        name: the class of its module.
        saved: what eager keeps, by the number of an argument or the name of a parameter.

    Raises:
        PortError: an argument or a parameter was written to.
    """
    for key, tensor in saved:
        is_argument = isinstance(key, int)
        then = call.given.values[key] if is_argument else call.state.get(key)
        if then is None or _unchanged(tensor, then):
            continue
        what = argument_name(call.given.paths[key]) if is_argument else f"the parameter {key!r}"
        instead = (
            "write out of place (x = x.masked_fill(mask, 0), not x.data.masked_fill_), or before"
            " the call"
            if is_argument
            else "write to it before the call or after the backward pass"
        )
        raise PortError(
            f"{what} of a call of {name} was written to by .data before the backward pass:"
            " eager PyTorch takes the gradient partly at the new values, a program at those of"
            " the call",
            code="TPU406",
            remedy=f"{instead}; for eager PyTorch's own gradient leave {name} and the layers in it"
            f" that use it to eager PyTorch: tpuport run --eager {name} --eager LAYER",
        )


def _unchanged(tensor: torch.Tensor, value: jax.Array) -> bool:
    if not _is_on_cpu(value) or tensor.layout != torch.strided:
        return True
    dtype = backend.jax_dtype(tensor.dtype)
    if value.dtype != dtype or value.ndim != tensor.ndim:
        return True
    with torch._C.DisableTorchFunction():
        now = tensor.detach()
        # Of a length that varies the program got the longest.
        then = backend.to_torch(value, now.dtype)[tuple(slice(size) for size in now.shape)]
        return bool(torch.equal(_bits(now), _bits(then)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers as integers, of which -0.0 and NaN are like any others."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_BITS[tensor.element_size()])


def _is_on_cpu(value: jax.Array) -> bool:
    return value.is_fully_addressable and all(one.platform == "cpu" for one in value.devices())
