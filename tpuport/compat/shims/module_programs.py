"""Module calls inside `porting()` become programs."""

import contextlib
import functools
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import torch

from tpuport.compat.emulated import programs
from tpuport.compat.emulated.growing_methods import looping_methods
from tpuport.compat.emulated.settings import active
from tpuport.foundation.patching.shim import REPLACED, Replacement, Shim
from tpuport.tracing.guards.code_reads import content


class ModuleProgram(Shim):
    """The outermost call of a module on the accelerator is one jitted program."""

    TARGET = "torch.nn.Module.__call__"
    REASON = "eager PyTorch cannot run on the accelerator"
    REFERENCE = "the same call in eager PyTorch on the CPU, with which the first one is compared"

    def replacements(self) -> list[Replacement]:
        original = torch.nn.Module.__dict__["__call__"]

        def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not programs.becomes_program(module, "forward"):
                return original(module, *args, **kwargs)
            return programs.call(module, "forward", original, args, kwargs)

        return [Replacement(torch.nn.Module, "__call__", call)]


class MethodProgram(Shim):
    """A method that the user named is one program, as a module call is.

    So is one whose loop calls the module with other sizes, if it can be one, and `forward` where
    code calls it itself.
    """

    TARGET = "torch.nn.Module.__init_subclass__"
    REASON = "a sampler or loss is often a method that calls several modules"
    REFERENCE = "the same call in eager PyTorch on the CPU, with which the first one is compared"

    def replacements(self) -> list[Replacement]:
        def announce(cls: type[torch.nn.Module], **options: Any) -> None:
            # What follows in the class's own order may take options: a mixin of huggingface_hub.
            super(torch.nn.Module, cls).__init_subclass__(**options)
            REPLACED.add(programs.METHODS, _named_methods(cls))

        made = [Replacement(torch.nn.Module, "__init_subclass__", classmethod(announce))]
        for cls in _subclasses(torch.nn.Module):
            made += _named_methods(cls)
        return made


def _subclasses(cls: type) -> Iterator[type]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)


def _named_methods(cls: type) -> list[Replacement]:
    settings = active()
    if settings is None:
        return []
    loops = looping_methods(cls)
    ways: dict[str, Any] = dict.fromkeys(loops.sized, _UNROLLED)
    ways |= dict.fromkeys(loops.growing, programs.attempt)
    if settings.methods:
        ways |= dict.fromkeys(programs.program_methods(settings, cls), programs.call)
    # A static method (YOLOX's SiLU) or one of the class is not given the module.
    is_method = isinstance(vars(cls).get("forward"), FunctionType)
    if is_method and not cls.__module__.startswith(_LIBRARIES):
        ways["forward"] = programs.call_forward
    return [Replacement(cls, name, _as_program(cls, name, way)) for name, way in ways.items()]


_UNROLLED = functools.partial(programs.attempt, is_whole=False)
# Their own code calls modules, not `forward`.
_LIBRARIES = ("torch.", "transformers.", "diffusers.", "torchvision.", "timm.")


def _as_program(cls: type, name: str, way: Any) -> Any:
    original = vars(cls)[name]

    @functools.wraps(original)
    def call(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (_is_its_own(module, name, cls) and programs.becomes_program(module, name)):
            return original(module, *args, **kwargs)
        with mode():
            return way(module, name, original, args, kwargs)

    mode = _mode_of(original)
    return call


def _is_its_own(module: torch.nn.Module, name: str, cls: type) -> bool:
    """Return whether the method that a class has under a name is the one that a module has.

    Code may call what a derived class or an attribute of the module has replaced: `super().forward`
    or `old = net.forward; net.forward = lambda x: old(x) * 2`. A program has the new one.
    """
    if name in vars(module):
        return False
    return next(one for one in type(module).__mro__ if name in vars(one)) is cls


def _mode_of(function: Any) -> Any:
    """Return the mode in which all of a function runs, as its decorator says: `torch.no_grad`.

    Without it a program would have a gradient that nobody can ask for.
    """
    for cell in getattr(function, "__closure__", None) or ():
        owner = getattr(content(cell), "__self__", None)
        if isinstance(owner, torch.no_grad):
            return torch.no_grad
        if isinstance(owner, torch.inference_mode) and owner.mode:
            return torch.inference_mode
    return contextlib.nullcontext
