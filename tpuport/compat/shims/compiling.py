"""`torch.compile` and TorchScript: a ported program is compiled by XLA, as one."""

from typing import Any

import torch

from tpuport.compat.emulated.settings import active
from tpuport.compat.shims._inside import functions
from tpuport.compat.shims.compiled_module import OptimizedModule
from tpuport.foundation.patching.shim import Replacement, Shim


def _compile(model: Any = None, **kwargs: Any) -> Any:
    if model is None:
        return lambda function: _compile(function, **kwargs)
    return OptimizedModule(model) if isinstance(model, torch.nn.Module) else model


_SCRIPT = torch.jit.script


def _script(obj: Any, optimize: Any = None, _frames_up: int = 0, **kwargs: Any) -> Any:
    # Torch itself needs what it scripts: its forward-mode derivatives take its graph.
    home = str(getattr(obj, "__module__", None)).partition(".")[0]
    if home == "torch" and not isinstance(obj, torch.nn.Module):
        # Names in a class are looked up in the frame of the caller: two functions are between.
        return _SCRIPT(obj, optimize, _frames_up + 2, **kwargs)
    return obj


def _traced(func: Any = None, example_inputs: Any = None, **kwargs: Any) -> Any:
    del example_inputs, kwargs
    return func


def _disable(fn: Any = None, recursive: bool = True, **kwargs: Any) -> Any:
    del recursive, kwargs
    return (lambda function: function) if fn is None else fn


def _never() -> bool:
    # TorchScript compiles the source of this, where torch itself scripts what asks.
    return False


_JIT = {
    "script": _script,
    "script_if_tracing": _script,
    "trace": _traced,
    "freeze": _script,
    "optimize_for_inference": _script,
}


def _script_later(function: Any) -> Any:
    return function


class Compiling(Shim):
    """Identities: a compiled function is the function itself, and a module calls the one it holds.

    Code compiled by inductor or TorchScript computes the same, and a ported program is
    compiled by XLA anyway.
    """

    TARGET = "torch.compile"
    REASON = "compiled code hides the functions that are ported, and wants a GPU's compiler"
    REFERENCE = "the function or module itself"

    def replacements(self) -> list[Replacement]:
        compiler = {
            "disable": _disable,
            "is_compiling": _never,
            "is_dynamo_compiling": _never,
            "reset": lambda: None,
            "cudagraph_mark_step_begin": lambda: None,
        }
        module = torch.nn.Module
        return [
            *functions(torch, {"compile": _compile}),
            *functions(torch.compiler, {**compiler, "compile": _compile}),
            *functions(torch.jit, _JIT),
            Replacement(module, "compile", _method(module.compile)),
        ]


def _method(eager: Any) -> Any:
    def compile(self: Any, *args: Any, **kwargs: Any) -> None:
        if active() is None:
            eager(self, *args, **kwargs)

    return compile


class Dynamo(Shim):
    """The names in `torch._dynamo` that user code knows, once something has imported it."""

    TARGET = "torch._dynamo.optimize"
    REASON = "as for torch.compile"
    REFERENCE = "the function itself"
    MODULE = "torch._dynamo"

    def replacements(self) -> list[Replacement]:
        import torch._dynamo as dynamo

        table = {
            "optimize": lambda *args, **kwargs: _script_later,
            "disable": _disable,
            "is_compiling": lambda: False,
            "mark_dynamic": lambda t, index, **kwargs: None,
            "maybe_mark_dynamic": lambda t, index: None,
            "mark_static": lambda t, index=None: None,
            "mark_static_address": lambda t, guard=True: None,
        }
        named = (dynamo, dynamo.eval_frame)
        # What was compiled before the block runs as it is written.
        stance = dynamo.eval_frame.DynamoStance("force_eager")
        return [
            *functions(dynamo, table),
            Replacement(dynamo.eval_frame, "_stance", stance),
            *(Replacement(one, "OptimizedModule", OptimizedModule) for one in named),
        ]
