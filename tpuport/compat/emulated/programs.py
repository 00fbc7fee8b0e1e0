"""Calls of the user's modules that are compiled without being asked for.

The outermost call of a module on the accelerator is one jitted program. Where it cannot be one,
the modules inside it become programs.
"""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.utils.rnn import PackedSequence

from tpuport.compat.emulated import captured_outputs
from tpuport.compat.emulated.call_lengths import CallLengths
from tpuport.compat.emulated.growing_methods import tells_others
from tpuport.compat.emulated.live_module import LiveModel
from tpuport.compat.emulated.parts import has_parts, is_on_accelerator
from tpuport.compat.emulated.report import CaughtError, Descended
from tpuport.compat.emulated.settings import PortingSettings, active
from tpuport.foundation.errors import ParityError, PortError, UsageError
from tpuport.foundation.tracebacks import trim
from tpuport.model.new_parameters import NewParameters
from tpuport.tracing.core.context import current
from tpuport.tracing.core.errors import inside_try
from tpuport.tracing.core.reentrancy import is_part_of_program, one_at_a_time, part_of_program
from tpuport.tracing.state.tensor_attributes import refuse_closed_parameters


class PortWarning(UserWarning):
    """Code ran in another way than asked for, with the same result."""


# The token under which methods of classes are replaced.
METHODS = object()
_PROGRAMS: "weakref.WeakKeyDictionary[torch.nn.Module, LiveModel]" = weakref.WeakKeyDictionary()
# By module the methods that cannot be one program.
_DESCENDED: "weakref.WeakKeyDictionary[torch.nn.Module, set[str]]" = weakref.WeakKeyDictionary()
_HOLDS_EAGER: "weakref.WeakKeyDictionary[torch.nn.Module, bool]" = weakref.WeakKeyDictionary()
# How many instances of a class were refused in a row. Each attempt takes the time of a trace, and
# the layers of a model have one class.
_REFUSED: Counter[tuple[type, str]] = Counter()
_TRIED = 2
# So many calls of a module may register parameters in eager PyTorch; then it is refused.
_REGISTERED: "weakref.WeakKeyDictionary[torch.nn.Module, int]" = weakref.WeakKeyDictionary()
_MOST_REGISTERED = 2


def programs() -> list[LiveModel]:
    """Return the modules that became programs so far, in order."""
    return list(_PROGRAMS.values())


def forget() -> None:
    """Drop every program, at the end of the last context."""
    _PROGRAMS.clear()
    _DESCENDED.clear()
    _REFUSED.clear()
    _REGISTERED.clear()
    _HOLDS_EAGER.clear()
    CallLengths.failures.clear()


def becomes_program(module: torch.nn.Module, method: str) -> bool:
    """Return whether a call made now is to be a program of its own."""
    settings = active()
    if settings is None or is_part_of_program():
        return False
    if not settings.port_modules and settings.hooks.instead is None:
        return False
    if _has_any_global_hook():
        return False
    if peek_interpreter_stack() is not None:
        return False  # torch.func transforms the single operations of what is called inside it
    if current() is not None or method in _DESCENDED.get(module, ()):
        return False
    if _REFUSED[type(module), method] >= _TRIED and module not in _PROGRAMS:
        return False
    return is_on_accelerator(module) and not (settings.eager and _holds_eager(module, settings))


def _holds_eager(module: torch.nn.Module, settings: PortingSettings) -> bool:
    """Return whether a class that is left to eager PyTorch is inside of a module, or is its own."""
    found = _HOLDS_EAGER.get(module)
    if found is None:
        classes = {type(one) for one in module.modules()}
        names = {name for c in classes for name in (c.__name__, f"{c.__module__}.{c.__qualname__}")}
        found = _HOLDS_EAGER[module] = not names.isdisjoint(settings.eager)
    return found


def call(
    module: torch.nn.Module, method: str, original: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Call a method as a program; if it cannot be one, run it eagerly, its submodules as programs.

    Raises:
        PortError: it has parameters, cannot be a program, and nothing inside it could.
    """
    settings = active()
    assert settings is not None
    if settings.hooks.instead is not None:
        return settings.hooks.instead(module, method, original, args, kwargs)
    try:
        if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
            return original(module, *args, **kwargs)
        return _run(module, method, args, kwargs, settings)
    except PortError as error:
        if isinstance(error, NewParameters) and _may_register(module):
            _forget_if_empty(module, settings)
            return _in_eager(module, method, original, args, kwargs)
        if _is_refused(module) or isinstance(error, ParityError):
            _name_the_option(error, module)
            trim(error)
            _say_caught(error, settings)
            raise
        _forget_if_empty(module, settings)
        return _descend(module, method, error, lambda: original(module, *args, **kwargs))


def _descend(module: torch.nn.Module, method: str, error: PortError, run: Callable[[], Any]) -> Any:
    """Run a call eagerly, its submodules as programs, and later calls of the method, too.

    Later calls may be programs if this one registers parameters: code that makes its layers in the
    first call only uses them afterwards.
    """
    settings = active()
    assert settings is not None
    _DESCENDED.setdefault(module, set()).add(method)
    _REFUSED[type(module), method] += 1
    known = len(list(torch.nn.Module.parameters(module)))
    one = Descended(_called(module, method), str(error))
    settings.report.descended.append(one)
    _say_descended(module, method, error)
    out = run()
    if len(list(torch.nn.Module.parameters(module))) > known and _may_register(module):
        _DESCENDED[module].discard(method)
        _REFUSED[type(module), method] -= 1
        settings.report.descended.remove(one)
    return out


def _called(module: torch.nn.Module, method: str) -> str:
    name = type(module).__name__
    return name if method == "forward" else f"{name}.{method}"


def _may_register(module: torch.nn.Module) -> bool:
    """Return whether a module may register parameters once more, and count that."""
    _REGISTERED[module] = count = _REGISTERED.get(module, 0) + 1
    return count <= _MOST_REGISTERED


def _in_eager(
    module: torch.nn.Module, method: str, original: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Call a method eagerly this once, its submodules as programs."""
    methods = _DESCENDED.setdefault(module, set())
    methods.add(method)
    try:
        return original(module, *args, **kwargs)
    finally:
        methods.discard(method)


def call_forward(
    module: torch.nn.Module, method: str, original: Any, args: tuple[Any, ...], kwargs: Any
) -> Any:
    """Call `forward`, which code names itself, as a program: without hooks it is a call."""
    if _has_hooks(module):
        return original(module, *args, **kwargs)
    return call(module, method, original, args, kwargs)


def _run(
    module: torch.nn.Module,
    method: str,
    args: tuple[Any, ...],
    kwargs: Any,
    settings: PortingSettings,
    *,
    is_whole: bool = False,
) -> Any:
    with one_at_a_time(), part_of_program():
        model = _PROGRAMS.get(module)
        if model is None:
            refuse_closed_parameters(module)
            captured_outputs.prepare(module)
            model = LiveModel(
                module, verified=settings.verify, rtol=settings.rtol, fallback=settings.fallback
            )
            _PROGRAMS[module] = model
            settings.report.programs.append(model.report)
        settings.calls.note(module, _DESCENDED)
        if is_whole:
            model.keep_loops(method)
        out = model.call(method, args, kwargs)
        _REFUSED.pop((type(module), method), None)
        if settings.hooks.after is not None:
            settings.hooks.after(module, method, model._last_key)
        return out


def attempt(
    module: torch.nn.Module,
    method: str,
    original: Any,
    args: tuple[Any, ...],
    kwargs: Any,
    *,
    is_whole: bool = True,
) -> Any:
    """Call a method whose loop calls the module with other sizes as one program, if it can be one.

    Otherwise it runs as it is written, with each step as a program. What that gives is right too,
    so other tokens than eager's (of two logits that are equal but for rounding) are no error.

    Args:
        module: The module.
        method: The name of the method.
        original: The method.
        args: Its arguments.
        kwargs: Its keyword arguments.
        is_whole: Whether a loop that makes tensors longer has to be one of the program's.
    """
    settings = active()
    assert settings is not None
    if settings.hooks.instead is not None:
        return settings.hooks.instead(module, method, original, args, kwargs)
    told = tells_others(original, (module, *args), kwargs)
    if told is not None:
        _note(module, method, f"each round of its loop calls the argument {told}", settings)
        return original(module, *args, **kwargs)
    try:
        return _run(module, method, args, kwargs, settings, is_whole=is_whole)
    except (PortError, UsageError) as error:
        # A program that cannot be made is not tried again; an argument may be another next time.
        if isinstance(error, PortError):
            _DESCENDED.setdefault(module, set()).add(method)
        _forget_if_empty(module, settings)
        _note(module, method, str(error), settings)
    return original(module, *args, **kwargs)


def _note(module: torch.nn.Module, method: str, why: str, settings: PortingSettings) -> None:
    """Have the report say why a method is not one program."""
    one = Descended(f"{type(module).__name__}.{method}", why)
    if one not in settings.report.descended:
        settings.report.descended.append(one)


def _name_the_option(error: PortError, module: torch.nn.Module) -> None:
    """Add to an error what helps a person who cannot edit the code."""
    name = type(module).__name__
    remedy = (error.remedy or "").replace("--eager NAME", f"--eager {name}")
    if "--eager" not in remedy:
        option = f"leave {name} to eager PyTorch on the CPU: tpuport run --eager {name}"
        remedy = f"{remedy}\n    or {option}" if remedy else option
    error.remedy = remedy


def _say_caught(error: PortError, settings: PortingSettings) -> None:
    """Say so if a `try` of the script catches an error, as it may go on without a word.

    A `try` of a package, such as that around a whole training, most often raises it again.
    """
    place = inside_try(error)
    one = CaughtError(place or "", str(error))
    is_own = place is not None and "-packages" not in place
    if is_own and one not in settings.report.caught:
        settings.report.caught.append(one)
        warnings.warn(str(one), PortWarning, stacklevel=4)


def _is_refused(module: torch.nn.Module) -> bool:
    """Return whether a module that is no program is an error: it has parameters and no submodules.

    A loss or a matcher that has buffers only runs as other code of the script does.
    """
    has_parameters = next(torch.nn.Module.parameters(module), None) is not None
    return has_parameters and not has_parts(module) and not _has_hooks(module)


def _has_hooks(module: torch.nn.Module) -> bool:
    """Return whether a call runs hooks, whose code the class does not know."""
    held = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any((*held, module._backward_pre_hooks))


def _forget_if_empty(module: torch.nn.Module, settings: PortingSettings) -> None:
    """Drop a module without any program, so that the report lists its submodules instead."""
    model = _PROGRAMS.get(module)
    if model is not None and not model.methods_compiled:
        del _PROGRAMS[module]
        reports = settings.report.programs
        reports[:] = [one for one in reports if one is not model.report]


def _say_descended(module: torch.nn.Module, method: str, error: PortError) -> None:
    inside = "its submodules are" if has_parts(module) else "and runs in eager PyTorch"
    said = f"{_called(module, method)} is not one program, {inside}: {error}"
    warnings.warn(said, PortWarning, stacklevel=5)


def program_methods(settings: PortingSettings, cls: type) -> list[str]:
    """Return the methods of a class that were named as programs (`Class.method`)."""
    found = []
    for entry in settings.methods:
        owner, _, method = entry.rpartition(".")
        if owner in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}") and method in vars(cls):
            found.append(method)
    return found
