"""Runs a training script and records what it computes, by hooks that torch itself offers.

This file is copied and run by itself, as `python recorder.py SETTINGS SCRIPT ARGS`, in eager
PyTorch and under a port alike. Losses are the tensors that `backward()` is called on; gradients,
parameters and the state of optimizers are read at `Optimizer.step`. What else is to be around the
script, such as other arithmetic, the settings name as `module:function`.
"""

import contextlib
import functools
import gc
import importlib
import importlib.util
import itertools
import json
import os
import random
import runpy
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# What Python reports of writes, and which of the arguments are the paths.
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_MADE = {"os.mkdir": 0, "os.truncate": 0, "os.link": 1, "sqlite3.connect": 0}


class EnoughSteps(BaseException):
    """The script has made the steps that were asked for."""


class StepRecorder:
    """What a script has computed so far.

    Args:
        folder: Where to write it.
        trained: A file to make as soon as the script calls `backward()`, however it ends.
        steps: The number of steps after which the script is stopped.
        disturbed: Whether to add to each gradient what rounding could, to see what becomes of it.
        noise: What that is by optimizer and position, where it is more than the rounding of the
            largest number.
        optimizers: Stop as soon as so many optimizers are about to make their first step, if not 0:
            their gradients are known then.
    """

    def __init__(
        self,
        folder: Path,
        trained: str,
        steps: int,
        *,
        disturbed: bool = False,
        noise: Mapping[str, float] | None = None,
        optimizers: int = 0,
    ) -> None:
        self.folder, self.steps, self.disturbed = folder, steps, disturbed
        self.trained = folder / trained
        self.enough = optimizers
        self.noise, self.sizes = torch.Generator().manual_seed(0), dict(noise or {})
        self.losses: list[list[float]] = []
        self.since_step: list[float] = []
        self.optimizers: list[Optimizer] = []
        self.names: dict[int, str] = {}
        self.roots: list[tuple[str, torch.nn.Module]] = []
        self.made_before: dict[int, list[weakref.ref[torch.nn.Module]]] = {}
        self.moved: list[str] = []
        self.sparse: set[str] = set()  # the parameters whose first gradient is sparse
        self.counts: list[int] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.in_backward = False

    def install(self) -> None:
        """Set the hooks."""
        register_optimizer_step_pre_hook(lambda optimizer, *_: self.before_step(optimizer))
        register_optimizer_step_post_hook(lambda optimizer, *_: self.after_step(optimizer))
        owners: tuple[Any, ...] = (torch.Tensor, torch.autograd)
        for owner in owners:
            owner.backward = self.recorded(owner.backward)
        torch.optim.Optimizer.__init__ = self.noting(torch.optim.Optimizer.__init__)
        processes: Any = torch.multiprocessing
        processes.spawn = called_here(processes.spawn)

    def noting(self, init: Callable[..., None]) -> Callable[..., None]:
        """Return the constructor of optimizers, which also notes what modules there are."""

        @functools.wraps(init)
        def call(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init(optimizer, *args, **kwargs)
            self.made_before[id(optimizer)] = [weakref.ref(module) for module in all_modules()]

        return call

    def recorded(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return `backward`, which also records the value that it is called on."""

        @functools.wraps(backward)
        def call(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if self.in_backward:  # one of the two calls the other
                return backward(tensors, *args, **kwargs)
            each = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
            # In the trace of a module that trains itself, tensors have no values.
            tracing = sys.modules.get("tpuport.tracing.core.tensor")
            real = [t for t in each if not isinstance(t, getattr(tracing, "TracedTensor", ()))]
            self.since_step += [float(tensor.detach().float().mean()) for tensor in real]
            self.in_backward = True
            self.trained.touch()
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                self.in_backward = False

        return call

    def before_step(self, optimizer: Optimizer) -> None:
        """Record the parameters and gradients that an optimizer's first step begins with."""
        if any(self.is_alias(optimizer, known) for known in self.optimizers):
            return
        if self.disturbed:
            self.disturb(optimizer)
        if any(optimizer is known for known in self.optimizers):
            return
        known = {id(p) for i in range(len(self.optimizers)) for _, p in self.parameters(i)}
        self.optimizers.append(optimizer)
        self.counts.append(0)
        self.name(optimizer)
        for key, parameter in self.parameters(len(self.optimizers) - 1):
            self.keep(f"start/{key}", parameter)
            if id(parameter) in known:
                self.moved.append(key)
            if parameter.grad is not None:
                self.keep(f"gradient/{key}", parameter.grad)
                self.sparse |= {key} if parameter.grad.is_sparse else set()
        if 0 < self.enough <= len(self.optimizers):
            raise EnoughSteps

    @staticmethod
    def is_alias(optimizer: Optimizer, known: Optimizer) -> bool:
        """Return whether an optimizer stands for another one, as Lightning's do: both may step."""
        return optimizer is not known and optimizer.param_groups is known.param_groups

    def disturb(self, optimizer: Optimizer) -> None:
        """Add rounding of the size of the largest gradient to all gradients."""
        held = [p.grad for group in optimizer.param_groups for p in group["params"]]
        each = ((i, g) for i, g in enumerate(held) if g is not None)
        gradients = {i: g._values() if g.is_sparse else g for i, g in each}
        largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
        known = (i for i, one in enumerate(self.optimizers) if one is optimizer)
        index = next(known, len(self.optimizers))
        for position, gradient in gradients.items():
            noise = torch.randn(gradient.shape, generator=self.noise, dtype=torch.float32)
            size = torch.finfo(torch.float32).eps * largest
            size = max(size, self.sizes.get(f"{index}.{position}", 0.0))
            gradient.data.add_((noise * size).to(gradient))

    def after_step(self, optimizer: Optimizer) -> None:
        """Count a step, and stop the script after the last one."""
        if any(self.is_alias(optimizer, known) for known in self.optimizers):
            return
        self.losses.append(self.since_step)
        self.since_step = []
        index = next(i for i, known in enumerate(self.optimizers) if known is optimizer)
        self.counts[index] += 1
        if self.counts[index] >= self.steps:
            raise EnoughSteps

    def name(self, optimizer: Optimizer) -> None:
        """Find the names of an optimizer's parameters, and the buffers beside them.

        The outermost module counts that holds most of them: a port has copies of those inside.
        """
        held = {
            id(p): i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])
        }
        modules = self.modules_for(optimizer)
        inner = {id(child) for module in modules for child in module.children()}
        roots: list[tuple[torch.nn.Module, dict[int, str]]] = []
        for root in (unwrapped(module) for module in modules if id(module) not in inner):
            named = {id(p): name for name, p in root.named_parameters() if id(p) in held}
            if named:
                roots.append((root, named))
        # A root that holds a part of another's, as the port's copy of a layer does, names nothing.
        # Of two that hold the same, the one with longer names is further out.
        # Of two that are alike, the one that the optimizer has first: each run has that order.
        size = {id(root): (-len(named), -len("".join(named.values()))) for root, named in roots}
        first = {id(root): min(held[p] for p in named) for root, named in roots}
        roots.sort(key=lambda one: (*size[id(one[0])], first[id(one[0])]))
        for root, named in roots:
            if not named.keys() <= self.names.keys():
                self.names = named | self.names
                self.roots.append((f"{len(self.counts) - 1}.{first[id(root)]}", root))

    def modules_for(self, optimizer: Optimizer) -> list[torch.nn.Module]:
        """Return the modules among which the names of an optimizer's parameters are looked for.

        A module that a call of the model puts around it, as torchdiffeq does, lives until the step
        in one run and not in the other, so modules that are newer than the optimizer do not count.
        """
        before = [reference() for reference in self.made_before.get(id(optimizer), ())]
        older = [module for module in before if module is not None]
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        named = {id(p) for module in older for p in module.parameters(recurse=False)}
        return older if held <= named else all_modules()

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that the modules have now, also those that they assigned anew."""
        found: dict[str, torch.Tensor] = {}
        for place, root in self.roots:
            for name, buffer in root.named_buffers():
                if found.setdefault(name, buffer) is not buffer:
                    found[f"{place}/{name}"] = buffer
        return found

    def parameters(self, index: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of an optimizer, each with a key that tells it from all others."""
        groups = self.optimizers[index].param_groups
        for position, parameter in enumerate(p for group in groups for p in group["params"]):
            yield f"{index}.{position}/{self.names.get(id(parameter), '?')}", parameter

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Keep a copy of a tensor's value."""
        value = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
        self.tensors[name] = value.cpu().clone()

    def finish(self) -> None:
        """Write everything, with what parameters and optimizers hold now."""
        described = [self.describe(index) for index in range(len(self.optimizers))]
        for name, buffer in self.buffers().items():
            self.keep(f"buffer/{name}", buffer)
        save_file(
            {name: t.contiguous() for name, t in self.tensors.items()},
            self.folder / "tensors.safetensors",
        )
        record = {
            "optimizers": described,
            "losses": [*self.losses, *([self.since_step] if self.since_step else [])],
            "steps": self.counts,
            "moved": self.moved,
        }
        (self.folder / "record.json").write_text(json.dumps(record))

    def describe(self, index: int) -> dict[str, Any]:
        """Keep what an optimizer and its parameters hold, and return the rest of it."""
        optimizer = self.optimizers[index]
        state = {id(p): values for p, values in optimizer.state.items()}
        for key, parameter in self.parameters(index):
            self.keep(f"end/{key}", parameter)
            for name, value in state.get(id(parameter), {}).items():
                if isinstance(value, (torch.Tensor, int, float)):
                    self.keep(f"state/{key}/{name}", torch.as_tensor(value))
        groups = [
            {k: v for k, v in group.items() if isinstance(v, (int, float, str, tuple, list))}
            for group in ({**g, "params": len(g["params"])} for g in optimizer.param_groups)
        ]
        parameters = {
            key: [
                list(p.shape),
                str(p.dtype),
                p.requires_grad,
                "sparse" if key in self.sparse else "dense",
            ]
            for key, p in self.parameters(index)
        }
        return {"class": type(optimizer).__name__, "groups": groups, "parameters": parameters}


class WrittenPaths:
    """A list of the files and folders that this process and its forks write, in the order of time.

    Args:
        file: Where it goes, a line in JSON for each: a path, or two of what was renamed.
    """

    def __init__(self, file: Path) -> None:
        self.file = str(file)
        self.known: set[str] = set()

    def install(self) -> None:
        """Watch what Python reports, and what writes files without a word to it."""
        sys.addaudithook(self.watch)
        torch.save = torch.serialization.save = self.noted(torch.save, "f", 1)
        torch.jit.save = self.noted(torch.jit.save, "f", 1)
        for name in ("safetensors", "safetensors.torch", "safetensors.numpy"):
            module: Any = importlib.import_module(name)
            module.serialize_file = self.noted(module.serialize_file, "filename", 1)

    def watch(self, event: str, args: tuple[Any, ...]) -> None:
        """Note what an event of `sys.addaudithook` says is written."""
        if event == "open":
            if isinstance(args[2], int) and args[2] & _WRITES:
                self.note(args[0])
        elif event == "os.rename":
            self.note(*args[:2])
        elif event in _MADE:
            self.note(args[_MADE[event]])

    def noted(self, function: Callable[..., Any], name: str, position: int) -> Callable[..., Any]:
        """Return a function that also notes the file that it is to write."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.note(args[position] if len(args) > position else kwargs.get(name))
            return function(*args, **kwargs)

        return call

    def note(self, *paths: Any) -> None:
        """Write down a path, or the old and the new one of what is renamed."""
        if not all(isinstance(path, (str, bytes, os.PathLike)) for path in paths):
            return
        full = [os.path.abspath(os.fsdecode(path)) for path in paths]
        line = json.dumps(full)
        if self.file in full or (len(full) == 1 and line in self.known):
            return
        self.known.add(line)
        # Should the disk be full, nothing is known of the file, and it stays where it is.
        with contextlib.suppress(OSError), open(self.file, "a") as file:
            file.write(line + "\n")


def called_here(spawn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `torch.multiprocessing.spawn` that calls what one process would run.

    A script for several devices trains in the processes that it spawns, on one device in one, which
    a recorder in this process would see nothing of.
    """

    @functools.wraps(spawn)
    def call(
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> Any:
        if nprocs != 1 or not join:
            return spawn(fn, args, nprocs, join, daemon, start_method)
        try:
            fn(0, *args)
        except SystemExit as error:  # which ends a process, and not the one that waits for it
            if error.code not in (None, 0):
                raise
        return None

    return call


def all_modules() -> list[torch.nn.Module]:
    """Return all modules of this process that are made: code may be before `super().__init__()`."""
    # A process has millions of objects, and only thousands of classes. The class alone is asked:
    # some objects warn if their `__class__` is read.
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.nn.Module)}
    found = itertools.compress(objects, map(kinds.__contains__, map(type, objects)))
    return [module for module in found if "_modules" in vars(module)]


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside of wrappers, such as those that are for several devices."""
    inside = module._modules.get("module")
    alone = len(module._modules) == 1 and not module._parameters and not module._buffers
    return unwrapped(inside) if inside is not None and alone else module


def run_script(script: str) -> None:
    """Run a script as `python` does, through the import system, whoever has a hook in it."""
    folder, file = os.path.split(os.path.abspath(script))
    sys.path[0] = folder
    stem, suffix = os.path.splitext(file)
    spec = importlib.util.find_spec(stem) if suffix == ".py" and "." not in stem else None
    loader: Any = None if spec is None else spec.loader
    if spec is None or spec.origin != os.path.join(folder, file) or not hasattr(loader, "get_code"):
        runpy.run_path(script, run_name="__main__")
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__file__=spec.origin, __builtins__=sys.modules["builtins"])
    # `python train.py` leaves no bytecode of train.py beside it, as a loader does.
    wrote = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    try:
        code = loader.get_code(stem)
    finally:
        sys.dont_write_bytecode = wrote
    exec(code, vars(main))


def record() -> None:
    """Run the script that the command line names."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    random.seed(settings["seed"])
    np.random.seed(settings["seed"])
    torch.manual_seed(settings["seed"])
    recorder = StepRecorder(
        *(Path(settings["folder"]), settings["trained"], settings["steps"]),
        disturbed=settings["disturbed"],
        noise=settings["noise"],
        optimizers=settings["optimizers"],
    )
    recorder.install()
    WrittenPaths(Path(settings["folder"]) / settings["written"]).install()
    if settings["before"]:
        runpy.run_path(settings["before"], {"FOLDER": settings["folder"]}, "__before__")
    sys.argv = sys.argv[2:]
    try:
        with contextlib.ExitStack() as stack:
            for name in settings["around"]:
                module, _, function = name.partition(":")
                stack.enter_context(getattr(importlib.import_module(module), function)(settings))
            run_script(sys.argv[0])
    except EnoughSteps:
        pass
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
    recorder.finish()


if __name__ == "__main__":
    record()
