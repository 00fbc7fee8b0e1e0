"""The model of a script and the inputs of its first call: what `tpuport compile` needs.

`tpuport compile tpuport.repository.capture:program` runs the script in eager PyTorch until the
model is called that an optimizer trains. The call itself is not made.
"""

import json
import os
import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tpuport.foundation.errors import UsageError

# The environment variable with the path of the settings.
SETTINGS = "TPUPORT_CAPTURE"
# What spreads a model over devices: the mesh does that.
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"}
_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "Adafactor": "adafactor"}


class _CapturedCall(SystemExit):
    """The end of a script: its model was called."""


class ModelCapture:
    """Watches modules and optimizers until the model of a script is called.

    Args:
        trains: Whether the script trains: then only a module counts whose parameters an optimizer
            holds.
    """

    def __init__(self, trains: bool) -> None:
        self.trains = trains
        self.held: dict[int, str] = {}
        self.found: dict[str, Any] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watch the calls of modules, and what optimizers hold, in the block."""
        import torch

        module_class: Any = torch.nn.Module
        optimizer_class: Any = torch.optim.Optimizer
        call, add = module_class.__call__, optimizer_class.add_param_group
        capture = self

        def watched_call(module: Any, *args: Any, **kwargs: Any) -> Any:
            capture.see(module, args, kwargs)
            return call(module, *args, **kwargs)

        def watched_add(optimizer: Any, group: Any) -> None:
            add(optimizer, group)
            for parameter in optimizer.param_groups[-1]["params"]:
                capture.held[id(parameter)] = type(optimizer).__name__

        module_class.__call__, optimizer_class.add_param_group = watched_call, watched_add
        try:
            yield
        finally:
            module_class.__call__, optimizer_class.add_param_group = call, add

    def see(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """End the script if this is the call of its model.

        Raises:
            SystemExit: it is.
        """
        names = [self.held.get(id(p)) for p in module.parameters()]
        wanted = any(names) if self.trains else bool(names)
        if not wanted or self.found is not None:
            return
        while type(module).__name__ in _WRAPPERS:
            module = module.module
        optimizer = next((_OPTIMIZERS[n] for n in names if n in _OPTIMIZERS), "adamw")
        self.found = {"model": module, "inputs": (args, kwargs)}
        if self.trains:
            module.train()
            self.found |= {"train": loss_of, "optimizer": optimizer}
        raise _CapturedCall(0)


def loss_of(output: Any) -> Any:
    """Return the sum of the scalars of an output, else the mean square of its numbers.

    The loss of a script outside of its model is not part of the program; this has its gradients'
    shapes.
    """
    import jax.numpy as jnp

    from tpuport.foundation.pytree import flatten

    arrays = [leaf for leaf in flatten(output)[0] if hasattr(leaf, "dtype")]
    leaves = [x for x in arrays if jnp.issubdtype(x.dtype, jnp.floating)]
    scalars = [x for x in leaves if x.ndim == 0]
    return sum(scalars or [(x * x).mean() for x in leaves])


def program() -> dict[str, Any]:
    """Run the script of the settings, and return the arguments of `tpuport.compile_for`.

    Raises:
        UsageError: the script ended before its model was called.
    """
    from tpuport.compat.runner.run import RunTarget, run

    settings = json.loads(Path(os.environ[SETTINGS]).read_text())
    place = runpy.run_path(settings["before"], {"FOLDER": settings["folder"]}, "__before__")
    capture = ModelCapture(settings["trains"])
    target = RunTarget(settings["script"], arguments=settings["arguments"])
    with capture.installed():
        run(target, rewrite=False, quiet=True, ends_process=False, port_modules=False)
    place["SEEN"].stop()
    if capture.found is None:
        raise UsageError("The script ended before an optimizer's model was called.")
    return capture.found
