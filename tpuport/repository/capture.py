"""The model of a script and the inputs of its first call: what `tpuport compile` needs.

Some models are never called themselves: the script calls `policy.compute_loss(batch)`, and that
calls modules inside. Then the method is the model.

`tpuport compile tpuport.repository.capture:program` runs the script in eager PyTorch until the
model is called that an optimizer trains. The call itself is not made.
"""

import atexit
import dis
import inspect
import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType, FunctionType, ModuleType
from typing import Any

from tpuport.foundation.errors import UsageError
from tpuport.foundation.imports import importing

# The environment variable with the path of the settings.
SETTINGS = "TPUPORT_CAPTURE"
# The file, in the folder of the settings, that says how much of what is trained the model has.
SHARE = "captured.json"
# What spreads a model over devices: the mesh does that.
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"}
_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "SGD": "sgd", "Adafactor": "adafactor"}
# What holds for the rest of the process that compiles.
_REST = ExitStack()


class _CapturedCall(SystemExit):
    """The end of a script: its model was called."""


class ModelCapture:
    """Watches modules and optimizers until the model of a script is called.

    Args:
        trains: Whether the script trains: then only a module counts whose parameters an optimizer
            holds.

    Attributes:
        held: The class of the optimizer that holds a parameter, by its id.
        numbers: How many numbers such a parameter has.
        groups: The optimizers, each with the parameters that it holds.
        found: The arguments of `tpuport.compile_for`, once the model was called.
        share: How much of what optimizers hold the model has.
    """

    def __init__(self, trains: bool) -> None:
        self.trains = trains
        self.held: dict[int, str] = {}
        self.numbers: dict[int, int] = {}
        self.groups: list[tuple[Any, dict[int, int]]] = []
        self.found: dict[str, Any] | None = None
        self.share = 1.0

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
            added = optimizer.param_groups[-1]["params"]
            for parameter in added:
                capture.held[id(parameter)] = type(optimizer).__name__
            capture.add(optimizer, {id(parameter): parameter.numel() for parameter in added})

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
        module = _begun_step(module) or module
        optimizer = next((_OPTIMIZERS[n] for n in names if n in _OPTIMIZERS), "adamw")
        outer = self._method_around(module)
        if outer is not None:
            module, args, kwargs = outer
        self.found = {"model": module, "inputs": (args, kwargs)}
        self.share = self._share_of(module)
        if self.trains:
            module.train()
            self.found |= {"train": loss_of, "optimizer": optimizer}
        raise _CapturedCall(0)

    def add(self, optimizer: Any, numbers: dict[int, int]) -> None:
        """Note what an optimizer holds."""
        self.numbers |= numbers
        known = next((held for one, held in self.groups if one is optimizer), None)
        if known is None:
            self.groups.append((optimizer, known := {}))
        known |= numbers

    def _share_of(self, module: Any) -> float:
        """Return how much a module has of what one optimizer holds: there may be idle ones."""
        own = {id(p) for p in module.parameters()}
        shares = [
            sum(number for key, number in held.items() if key in own) / max(1, sum(held.values()))
            for _, held in self.groups
        ]
        return max(shares, default=1.0)

    def _numbers_of(self, module: Any) -> int:
        return sum(self.numbers.get(id(p), 0) for p in module.parameters())

    def _method_around(self, module: Any) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
        """Return the method, with its arguments, of a larger module that is calling this one."""
        import torch

        best, found = self._numbers_of(module), None
        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if isinstance(owner, torch.nn.Module) and code.co_name != "__call__":
                held = self._numbers_of(owner)
                given = _arguments_of(frame) if held > best else None
                if given is not None:
                    best, found = held, (method_model(owner, code.co_name), (), given)
            frame = frame.f_back
        return found


def _arguments_of(frame: FrameType) -> dict[str, Any] | None:
    """Return the arguments of a call that is going on; None if it may have bound them anew."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    names = code.co_varnames[1:count]
    stored = {one.argval for one in dis.get_instructions(code) if one.opname == "STORE_FAST"}
    more = code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS)
    if more or code.co_posonlyargcount or not stored.isdisjoint(names):
        return None
    return {name: frame.f_locals[name] for name in names}


def method_model(owner: Any, name: str) -> Any:
    """Return a module that calls a method of another one; its class is named after both."""
    import torch

    class Method(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.owner = owner

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            with _attributes_kept(self.owner), _logs_dropped(self.owner):
                return getattr(self.owner, name)(*args, **kwargs)

    Method.__name__ = Method.__qualname__ = f"{type(owner).__name__}.{name}"
    return Method()


def _begun_step(module: Any) -> Any:
    """Return the training step that a call of a Lightning module begins; None if it begins none.

    Lightning's strategies for several devices bind the module's `forward` to a step for one call.
    """
    if "forward" not in vars(module) or not _is_lightning(module):
        return None
    del module.forward
    return method_model(module, "training_step")


def _is_lightning(module: Any) -> bool:
    return all(callable(getattr(module, name, None)) for name in ("training_step", "log_dict"))


@contextmanager
def _logs_dropped(owner: Any) -> Iterator[None]:
    """Let Lightning modules log nothing in the block: they may only in a loop of their trainer."""
    with importing():
        from tpuport.training.adapters.lightning import logs_caught
    with ExitStack() as stack:
        for module in filter(_is_lightning, owner.modules()):
            stack.enter_context(logs_caught(module, {}))
        yield


@contextmanager
def _attributes_kept(owner: Any) -> Iterator[None]:
    """Undo what the block binds to attributes: what a module notes for later is no state of a step.

    Nor is what an object of its notes, as the scheduler of a diffusion model where its tables are.
    Parameters and buffers are in tables of their own, and change.
    """
    modules = list(owner.modules())
    objects = {id(one): one for module in modules for one in vars(module).values() if _notes(one)}
    before = [(holder, dict(vars(holder))) for holder in (*modules, *objects.values())]
    try:
        yield
    finally:
        for holder, known in before:
            now = vars(holder)
            for name in [name for name in now if name not in known]:
                del now[name]
            now.update((name, value) for name, value in known.items() if now.get(name) is not value)


def _notes(value: Any) -> bool:
    """Return whether a value is an object with attributes of its own, no module or tensor."""
    import torch

    others = torch.nn.Module, torch.Tensor, type, ModuleType, FunctionType
    return isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, others)


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
    with importing():
        from tpuport.compat.porting import porting
        from tpuport.compat.runner.run import RunTarget, run

    settings = json.loads(Path(os.environ[SETTINGS]).read_text())
    place = runpy.run_path(settings["before"], {"FOLDER": settings["folder"]}, "__before__")
    capture = ModelCapture(settings["trains"])
    target = RunTarget(settings["script"], arguments=settings["arguments"])
    with capture.installed():
        run(target, rewrite=False, quiet=True, ends_process=False, port_modules=False)
    place["SEEN"].stop()
    # A forward that asks for CUDA (`x.cuda()`) is compiled in this process, after this function.
    atexit.register(_REST.close)
    _REST.enter_context(porting(port_modules=False))
    if capture.found is None:
        raise UsageError("The script ended before an optimizer's model was called.")
    share = Path(settings["folder"]) / SHARE
    share.write_text(json.dumps({"share": capture.share}))
    return capture.found
