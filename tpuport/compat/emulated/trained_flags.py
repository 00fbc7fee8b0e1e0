"""Parameters that a call makes require grad, as the discriminator in the loss of a GAN."""

import contextlib
from collections.abc import Iterable, Iterator

import torch

from tpuport.tracing.session.tracer import Tracer
from tpuport.tracing.state.request import TraceResult


@contextlib.contextmanager
def late(tracer: Tracer, user: torch.nn.Module, outcome: TraceResult) -> Iterator[bool]:
    """Have the parameters differentiated that a call makes require grad, and say if there are any.

    The program is traced with their flags as they are before the call, which its code may read, and
    what it computes from them until then gives them no gradient.

    Args:
        tracer: of the module.
        user: the user's module.
        outcome: of the program that is about to run; False is given if it knows of them.
    """
    changes = outcome.python_changes
    wanted = [] if changes is None else [name for name, flag in changes.trained.items() if flag]
    names = {name for name in wanted if not user.get_parameter(name).requires_grad}
    if not torch.is_grad_enabled() or not names - tracer.late:
        yield False
        return
    tracer.late |= names
    try:
        yield True
    finally:
        tracer.late -= names


def begin(tensors: Iterable[torch.Tensor]) -> None:
    """Make the tensors require grad that torch is about to differentiate by.

    torch's graph begins at the parameters that require grad when the program is called.
    """
    for tensor in tensors:
        if not tensor.requires_grad:
            tensor.requires_grad_()
