"""`tpuport.convert`, which makes a `PortedModel` of a module or function."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch
from torch.nn.modules.module import _global_forward_pre_hooks as _global_pre_hooks

from tpuport.foundation.errors import SignatureError, UsageError
from tpuport.foundation.interop import backend
from tpuport.model.options import ConvertOptions
from tpuport.model.ported_model import PortedModel
from tpuport.tracing.session.graph_passes import Pass
from tpuport.tracing.state.module_state import named_owners


def convert(
    target: torch.nn.Module | torch.export.ExportedProgram | Callable[..., Any],
    args: tuple[Any, ...] | None = None,
    kwargs: dict[str, Any] | None = None,
    *,
    methods: tuple[str | Callable[..., Any], ...] = ("forward",),
    verify: bool | str = True,
    rtol: float | None = None,
    checks: bool = True,
    matmul_precision: str | None = "highest",
    blocks: str = "auto",
    fallback: str | None = None,
    passes: Sequence[Pass] = (),
) -> PortedModel:
    """Port a PyTorch module or function to a jitted JAX program, checked against eager PyTorch.

    Args:
        target: an `nn.Module` (weights on the CPU, or on the meta device for shapes only), a
            function of tensors, or an `ExportedProgram`. A `GraphModule` is a module, and of what
            `torch.compile` returned, the original is ported.
        args: example positional arguments; with them the port is traced, compiled and checked now
            instead of at the first call.
        kwargs: example keyword arguments, likewise.
        methods: the methods to port, each called as `ported.name(...)`, "forward" as `ported(...)`;
            a function `def loss(model, batch): ...` among them is called as `ported.loss(batch)`.
        verify: which calls are compared with eager PyTorch on the CPU; it raises if they differ.
            "first" (or True): the first of each method, and gradients at the first step of
            `make_train_step` and the first `apply` under `jax.grad`. "sample": also some later
            calls, at random, on a thread of its own for at most a twentieth of the time; what it
            finds is raised at the next call. "always": every call. False: none.
        rtol: tolerance of that comparison, relative to the largest element; default 1e-4 in
            float32, 2e-2 in bfloat16. Beyond it, what eager PyTorch itself misses of its result in
            float64 is accepted. Integers and bools are compared exactly.
        checks: raise what the code and its operations raise for values (`if x.min() < 0: raise`, an
            index out of range), after the call. False drops these errors, which saves a wait for
            the device at each call.
        matmul_precision: JAX precision of float32 products ("highest" is float32 as in PyTorch;
            None leaves jax's setting).
        blocks: how repeated blocks are traced. "auto" traces one for all that are like it, and on
            TPU runs them as a loop if no weights are copied for that (`tpuport.stack_blocks`);
            "scan" always makes the loop; "once" never does; "unroll" traces each block.
        fallback: "host" lets a function that the target calls, and that cannot be traced, run on
            the host in eager PyTorch, as a callback of the program, gradients included. The report
            names each with what it cost. None (the default) refuses such code.
        passes: functions of a `torch.fx.GraphModule` that change it or return another, applied in
            order to the graph of `forward` each time it is traced: `torch.fx.symbolic_trace`'s, or
            that of a GraphModule or ExportedProgram. The result is compared with the target itself.

    Returns:
        The ported model. The target itself, its class and all global state are as before.

    Raises:
        UsageError: `target` is not a module or function, is on an accelerator or already on jax,
            `methods` names none of its methods, or `blocks` or `verify` is none of its choices.
        PortError: the code cannot be ported exactly; the message names the line.
        ParityError: the port's result differs from eager's; the report names the first module that
            differs.
    """
    target = _unwrapped(target)
    names, functions = _named(methods)
    options = ConvertOptions(
        names, functions, verify, rtol, checks, matmul_precision, blocks, fallback, tuple(passes)
    )
    _check_target(target, names, functions)
    ported = PortedModel(target, options)
    if args is not None or kwargs is not None:
        args, kwargs = () if args is None else args, {} if kwargs is None else kwargs
        _check_arguments(target, names[0], functions.get(names[0]), args, kwargs)
        ported.trace_now(names[0], tuple(args), kwargs)
    return ported


def _unwrapped(target: Any) -> Any:
    """Return the module that a program of torch's compilers runs."""
    if isinstance(target, torch.export.ExportedProgram):
        return target.module()
    # By name, since importing torch._dynamo takes a second.
    return target._orig_mod if type(target).__name__ == "OptimizedModule" else target


def _named(
    methods: tuple[str | Callable[..., Any], ...],
) -> tuple[tuple[str, ...], dict[str, Callable[..., Any]]]:
    """Return the names of methods, and the functions among them by name."""
    if isinstance(methods, str):
        msg = (
            f"methods must be a tuple of names, got the string {methods!r};"
            f" write methods=({methods!r},)"
        )
        raise UsageError(msg)
    names, functions = [], {}
    for one in methods:
        name = one if isinstance(one, str) else getattr(one, "__name__", "")
        if name is not one:
            if not name.isidentifier() or name in functions:
                msg = (
                    f"methods has {one!r}: a function is called by its name, which must be a Python"
                    " identifier and occur once; write it as def loss(model, ...): ..."
                )
                raise UsageError(msg)
            functions[name] = one
        names.append(name)
    return tuple(names), functions


def _check_target(
    target: Any, methods: tuple[str, ...], functions: dict[str, Callable[..., Any]]
) -> None:
    if isinstance(target, PortedModel):
        msg = "convert() got a PortedModel: it is ported already; call it"
        raise UsageError(msg)
    if isinstance(target, type):
        msg = (
            f"convert() got the class {target.__name__}; pass an instance:"
            f" tpuport.convert({target.__name__}(...))"
        )
        raise UsageError(msg)
    if not isinstance(target, torch.nn.Module):
        if not callable(target):
            msg = f"convert() expected an nn.Module or a function, got {type(target).__name__}"
            raise UsageError(msg)
        if functions:
            msg = (
                f"methods has the function {next(iter(functions))!r}, and there is no module for it"
            )
            raise UsageError(msg)
        return
    _check_module(target, [name for name in methods if name not in functions])


def _check_class(name: str, tensor: Any) -> None:
    """Refuse a weight of a class that keeps torch's functions from its tensor."""
    if torch.nn.parameter.is_lazy(tensor):
        msg = f"{name} has no values yet: call the lazy module once, then convert it"
        raise UsageError(msg)
    try:
        tensor.detach().resolve_conj()
    except (TypeError, AttributeError) as error:
        kind = type(tensor).__name__
        msg = (
            f"{name} is a {kind}, a class of tensors that refuses torch's functions: {error};"
            " convert a module that holds the plain tensor inside, and makes this of it in forward"
        )
        raise UsageError(msg) from error


def _check_module(target: torch.nn.Module, methods: list[str]) -> None:
    for name in methods:
        if not callable(getattr(target, name, None)):
            msg = f"methods names {name!r}, but {type(target).__name__} has no such method"
            raise UsageError(msg)
    for name, module in named_owners(target):
        if type(module).__hash__ is None:
            msg = (
                f"{name or 'the module'} is of the class {type(module).__name__}, which defines"
                " __eq__ without __hash__, so that PyTorch itself cannot list its parameters: add"
                " `__hash__ = torch.nn.Module.__hash__` to the class"
            )
            raise UsageError(msg)
    # As everywhere by torch's own method: that of a class may leave weights out (torchrl's does).
    for name, tensor in [
        *torch.nn.Module.named_parameters(target),
        *torch.nn.Module.named_buffers(target),
    ]:
        if isinstance(tensor, backend.TorchaxTensor) or isinstance(
            tensor.data, backend.TorchaxTensor
        ):
            msg = (
                f"the model is already on jax ({name} is a torchax tensor);"
                " convert the model as it is before .to('jax'):"
                " convert() moves the weights itself"
            )
            raise UsageError(msg)
        if tensor.device.type not in ("cpu", "meta"):
            msg = (
                f"{name} is on {tensor.device}; move the model to the CPU first:"
                " convert(model.cpu())"
            )
            raise UsageError(msg)
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            _check_class(name, tensor)


def _check_arguments(
    target: Any,
    method: str,
    function: Callable[..., Any] | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if isinstance(args, (torch.Tensor, jax.Array)) or not isinstance(args, (tuple, list)):
        msg = (
            f"args must be a tuple of the positional arguments, got {type(args).__name__};"
            " write args=(x,)"
        )
        raise UsageError(msg)
    if not isinstance(kwargs, dict):
        msg = f"kwargs must be a dict of the keyword arguments, got {type(kwargs).__name__}"
        raise UsageError(msg)
    if function is not None:
        check_signature(function, method, (target, *args), kwargs)
    else:
        check_signature(target, method, tuple(args), kwargs)


def check_signature(
    target: Any, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse a call that Python would refuse, before anything is traced.

    Raises:
        SignatureError: a missing, unknown or repeated argument.
    """
    is_module = isinstance(target, torch.nn.Module)
    if is_module and method == "forward" and (target._forward_pre_hooks or _global_pre_hooks):
        return  # a hook may give the arguments that are missing, and take others away
    function = getattr(target, method) if is_module else target
    try:
        # Not that of what a decorator wraps: it may give arguments, or wrap a function of a class.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = type(target).__name__ if is_module else getattr(target, "__name__", "function")
        shown = f"{name}.{method}" if is_module else name
        msg = f"{shown}: {error}; its signature is {shown}{signature}"
        raise SignatureError(msg) from error
