"""Parameters that a call makes require grad, as the discriminator in the loss of a GAN."""

from typing import Any

import torch


def begin(user: torch.nn.Module, changes: Any) -> bool:
    """Make parameters require grad ahead of a call that does so, and say whether any did not.

    torch's graph begins at the parameters that require grad when the program is called.

    Args:
        user: the user's module.
        changes: what the program changes in its Python state, or None.
    """
    wanted = [] if changes is None else [name for name, flag in changes.trained.items() if flag]
    late = [p for p in map(user.get_parameter, wanted) if not p.requires_grad]
    for parameter in late:
        parameter.requires_grad_()
    return bool(late)
