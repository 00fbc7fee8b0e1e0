"""What a call that raises leaves behind: eager PyTorch keeps what it wrote until then."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.core
import torch

from tpuport.foundation import pytree
from tpuport.foundation.errors import PortError, TpuportError
from tpuport.foundation.user_frames import raised_by_tpuport, user_places
from tpuport.model.parity.call import Call
from tpuport.model.parity.same_numbers import SameNumbers
from tpuport.model.parity.verify import host_arguments, in_eager
from tpuport.tracing.core import arguments
from tpuport.tracing.core.errors import FOR_VALUES, port_error
from tpuport.tracing.core.int64 import is_64
from tpuport.tracing.core.keys import next_key
from tpuport.tracing.guards import host_randomness

# Memory that ran out, or a device that failed, is no error of the code; nor is a signal to trace
# again.
_NOT_OF_THE_CODE = ("jax", "jaxlib", "tpuport")


def is_of_the_code(error: Exception, given: Any) -> bool:
    """Return whether the ported code raised an error, in a call that has values."""
    if isinstance(error, (TpuportError, MemoryError)):
        return False
    if type(error).__module__.partition(".")[0] in _NOT_OF_THE_CODE:
        return False
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in pytree.flatten(given)[0])


@contextlib.contextmanager
def refused_if_alone(given: Any) -> Iterator[None]:
    """Refuse what the port alone raises in the block, in a call that eager PyTorch has finished.

    Code that looks something up by the identity of a tensor may find nothing in a trace.

    Raises:
        PortError: the code raised. The error that it raised is the cause.
    """
    try:
        yield
    except Exception as error:
        is_retried = arguments.long_integers(given, error) is not None
        # Such as for a write to a leaf, which the tensor that eager PyTorch was given here is not.
        is_eagers = isinstance(error, RuntimeError) and raised_by_tpuport(error)
        if not is_of_the_code(error, given) or is_retried or is_eagers:
            raise
        place = next(user_places(error.__traceback__), None)
        notes = [n for n in getattr(error, "__notes__", ()) if n.startswith(FOR_VALUES)]
        if notes:
            raise _of_values(error, notes[0].removeprefix(FOR_VALUES)) from error
        raise port_error(
            f"the traced code raises {type(error).__name__}: {error}; eager PyTorch does not",
            code="TPU105",
            remedy="leave what this line does to a method that is not traced, or keep what it looks"
            " up under a name (str) instead of under a tensor or its id; under porting(), leave the"
            " class to eager PyTorch: --eager NAME",
            place=None if place is None else str(place),
        ) from error


def _of_values(error: Exception, site: str) -> PortError:
    """Return the refusal of a check that fails for the port's numbers and not for eager's."""
    why = "" if is_64() else ", such as where float64, which JAX holds in 32 bits, has smaller ones"
    return port_error(
        f"a check fails for the program's numbers: {type(error).__name__}: {error}; eager"
        f" PyTorch's pass it{why}",
        code="TPU105",
        remedy='compute this part in 64 bits: jax.config.update("jax_enable_x64", True) before'
        " convert; or leave the class to eager PyTorch under porting(): --eager NAME",
        place=site,
    )


def follow(ported: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Leave buffers, attributes and arguments as eager PyTorch leaves them in a call that raises.

    A program that fails gives no state. So the code runs in eager PyTorch once more, on a copy of
    the module with the state and the random numbers of the call.
    """
    call = _newest(ported, method, args, kwargs)
    if call.module is None or ported._is_placed:
        return
    before, edits = ported._tracer, ported._edits
    ported._edits = None  # so that the copy is a new one
    module = ported.module
    numbers = SameNumbers.of(call)
    given = host_arguments((call.args, call.kwargs), numbers)
    function = call.tracer.method(module, method)
    drawn: list[host_randomness.States] = []
    try:
        with call.tracer.outside(method).left_alone(), in_eager(call, numbers):
            with _left_to(call, drawn):
                function(*given[0], **given[1])
    except Exception:
        ported._take_edits()
        for states in drawn:
            states.restore()
    else:  # only the program raises
        ported._tracer, ported._edits = before, edits
        return
    if edits is None:
        ported._edits = None
    _write_arguments((args, kwargs), given)


@contextlib.contextmanager
def _left_to(call: Call, drawn: list[host_randomness.States]) -> Iterator[None]:
    """Add to a list the states in which the block leaves the host's generators."""
    try:
        yield
    finally:
        if call.draws_on_host:
            drawn.append(call.host.now())


def repeat(
    ported: Any,
    module: torch.nn.Module,
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Run a call that raises in eager PyTorch, on a module and arguments that it may write to."""
    call = _newest(ported, method, args, kwargs)
    with contextlib.suppress(Exception), in_eager(call, SameNumbers.of(call)):
        call.tracer.method(module, method)(*args, **kwargs)


def _newest(ported: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    key = next_key() if ported._last_key is None else ported._last_key
    call, program = Call.of(ported, method, args, kwargs, key), ported._last_program
    tape = None if program is None else program.tape
    return call if tape is None or tape.before is None else replace(call, host=tape.before)


def _write_arguments(args: Any, left: Any) -> None:
    """Write what eager PyTorch wrote to the tensors of the caller."""
    ours, theirs = pytree.flatten(args, objects=True)[0], pytree.flatten(left, objects=True)[0]
    if len(ours) != len(theirs):
        return
    with torch.no_grad():
        for mine, other in zip(ours, theirs, strict=True):
            both = isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor)
            if both and other._version and mine.shape == other.shape:
                mine.copy_(other)
