"""Harms that plain torchax does without an error, one of which an example of a rule declares.

Each function takes the example's `forward` and a list of arguments for each seed. It returns None
if it sees the harm, else the reason why the example no longer shows it. The pages of the rules
quote the first paragraph of its docstring after "Check for".
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpuport.testing.equivalence import (
    Inputs,
    PlainProgram,
    compare,
    difference,
    moved,
    observe,
    plain_jit,
)

Harm = Callable[[Callable[..., Any], Sequence[Inputs]], str | None]


def differs(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for a silently wrong result: it differs from eager PyTorch's for some inputs."""
    for args in inputs:
        expected = observe(function, args)
        got = observe(lambda *args: plain_jit(function, args), args)
        if got.error is not None:
            return f"plain torchax raises {got.error[0].__name__} instead"
        if difference(expected.value, got.value, rtol=1e-4) is not None:
            return None
    return "plain torchax gives what eager PyTorch gives"


def repeats(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for random numbers that are drawn once, when the program is traced, and then stay."""
    import jax
    import torchax
    from torchax import interop

    args = inputs[0]
    first, second = (observe(function, args) for _ in range(2))
    if compare(first, second) is None:
        return "eager PyTorch gives the same in two calls"
    with warnings.catch_warnings(), torchax.default_env():
        warnings.simplefilter("ignore")
        jitted = jax.jit(interop.jax_view(function))
        arrays = interop.jax_view(moved(args))
        results = [[leaf.tolist() for leaf in jax.tree.leaves(jitted(*arrays))] for _ in range(2)]
    return None if results[0] == results[1] else "two calls of the program differ"


def freezes(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for numbers that eager PyTorch draws anew, and a program with its own key does not."""
    args, program = inputs[0], PlainProgram(function)
    if difference(function(*args), function(*args)) is None:
        return "eager PyTorch gives the same in two calls"
    same = difference(program(*args), program(*args)) is None
    return None if same else "two calls of the program differ"


def forgets(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for state that each call advances in eager PyTorch, and the program does not."""
    eager, program = copy.deepcopy(function), PlainProgram(function)
    for number, args in enumerate([inputs[0], *inputs]):
        if difference(eager(*args), program(*args), rtol=1e-4) is not None:
            return None if number else "already the first call differs"
    return "every call gives what eager PyTorch gives"


def leaks(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for a tracer left in an attribute, on which the trace for another batch size fails."""
    import jax

    program = PlainProgram(function)
    smaller = tuple(arg[:-1] if isinstance(arg, torch.Tensor) else arg for arg in inputs[0])
    program(*inputs[0])
    try:
        program(*smaller)
    except jax.errors.UnexpectedTracerError:
        return None
    return "a second trace runs"


def second_trace_differs(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for state left by a trace that makes the program for a second batch size wrong."""
    eager, program = copy.deepcopy(function), PlainProgram(function)
    smaller = tuple(arg[:-1] if isinstance(arg, torch.Tensor) else arg for arg in inputs[0])
    for number, args in enumerate([inputs[0], smaller]):
        if difference(eager(*args), program(*args), rtol=1e-4) is not None:
            return None if number else "already the first program differs"
    return "both programs give what eager PyTorch gives"


def gradient_flows(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for a gradient that eager PyTorch stops and `jax.grad` does not."""
    import jax
    import torchax
    from torchax import interop

    leaf, *rest = (_leaf(arg) for arg in inputs[0])
    function(leaf, *rest).sum().backward()
    with torchax.default_env():
        first, *others = moved(inputs[0])

        def loss(array: Any) -> Any:
            return interop.jax_view(function(interop.torch_view(array), *others).sum())

        gradient = torch.tensor(jax.grad(loss)(interop.jax_view(first)).tolist())
    expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    if difference(expected, gradient, rtol=1e-4) is not None:
        return None
    return "jax.grad gives the gradient of eager PyTorch"


def _leaf(value: Any) -> Any:
    is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.clone().requires_grad_() if is_float else value


def keeps_activations(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for a checkpoint that is missing in the program: nothing is computed again."""
    import jax
    import torchax
    from torchax import interop

    with torchax.default_env():

        def loss(*arrays: Any) -> Any:
            return interop.jax_view(function(*interop.torch_view(arrays)).sum())

        arrays = interop.jax_view(moved(inputs[0]))
        program = str(jax.make_jaxpr(jax.grad(loss))(*arrays))
    return "the program has a checkpoint" if "remat" in program else None


def retraces(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for a model that is traced for each of its calls, once it is ported.

    The example's function is a method of an object whose `model` it calls.
    """
    import tpuport
    from tpuport.testing.retrace import TraceCounter

    owner = function.__self__  # pyright: ignore[reportFunctionMemberAccess]
    args = inputs[0]
    calls, counter = TraceCounter(owner.model.forward), TraceCounter(owner.model.forward)
    owner.model.forward = calls.counted
    function(*args)
    owner.model.forward = counter.counted
    owner.model = tpuport.convert(owner.model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(*args)
    # A port calls the model eagerly and under the tracer for each program, so a count at least as
    # high as that of the calls means that no program was reused.
    return None if counter.count >= calls.count > 1 else "one program serves several calls"


def trains_frozen(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for frozen parameters that an optimizer holds, and that get a gradient in `jax.grad`.

    The example's function returns the model and the optimizer.
    """
    import jax
    import torchax
    from torchax import interop

    model, optimizer = function(*inputs[0])
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    frozen = {
        name
        for name, parameter in model.named_parameters()
        if id(parameter) in held and not parameter.requires_grad
    }
    with torchax.default_env():
        arrays = interop.jax_view({k: v.detach().to("jax") for k, v in model.named_parameters()})
        args = moved(inputs[0])

        def loss(state: Any) -> Any:
            out = torch.func.functional_call(model, interop.torch_view(state), args)
            return interop.jax_view(out.sum())

        gradients = jax.grad(loss)(arrays)
    if any(abs(gradients[name]).max() > 0 for name in frozen):
        return None
    return "the optimizer holds no frozen parameter with a gradient"


def prints(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for text about a tensor without its value: it was made when the program was traced."""
    expected = observe(function, inputs[0])
    got = observe(lambda *args: plain_jit(function, args), inputs[0])
    if got.error is not None:
        return f"plain torchax raises {got.error[0].__name__} instead"
    return None if "Tracer" in got.printed and expected.printed else "the same is printed"


def unrolls(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for a program that is longer when a dimension of its first input is twice as long."""
    args = inputs[0]
    first, *others = args
    short = program_length(function, args)
    for dim in range(first.ndim):
        longer = (torch.cat([first, first], dim), *others)
        if observe(function, longer).error is None and program_length(function, longer) > short:
            return None
    return f"the program always has {short} operations"


def program_length(function: Callable[..., Any], args: Inputs) -> int:
    """Count the equations of a function's jaxpr under plain torchax."""
    import jax
    import torchax
    from torchax import interop

    with warnings.catch_warnings(), torchax.default_env():
        warnings.simplefilter("ignore")
        moved = tuple(arg.to("jax") if isinstance(arg, torch.Tensor) else arg for arg in args)
        program = jax.make_jaxpr(interop.jax_view(function))(*interop.jax_view(moved))
    return len(program.eqns)


def needs_cuda(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for code that eager PyTorch cannot run without CUDA, so there is no reference."""
    error = observe(function, inputs[0]).error
    if error is None or "CUDA" not in error[1]:
        return f"eager PyTorch without CUDA says {error}"
    return None


def ignores_autocast(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for a region of mixed precision that computes in the float32 of its operands."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns that it turns the region off
        result = plain_jit(function, inputs[0])
    if result.dtype is not torch.float32:
        return f"the region computes in {result.dtype}"
    return None


def computes_in_half(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for a program that computes in float16, which no TPU multiplies."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = plain_jit(function, inputs[0])
    return None if result.dtype is torch.float16 else f"the program computes in {result.dtype}"


def fails_beside_torchax(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Check for code that eager PyTorch cannot run any more once torchax alone is imported.

    torchax registers an accelerator that PyTorch is not linked with; `tpuport` undoes that. If the
    module has a function `load`, that one is run, because loading data is not part of the step.
    """
    import torchax.device_module as announced

    if "load" in function.__globals__:
        function, inputs = function.__globals__["load"], [()]
    before = announced.is_available
    announced.is_available = lambda: True
    try:
        error = observe(function, inputs[0]).error
    finally:
        announced.is_available = before
    if error is None or not ("jax devices" in error[1] or "PrivateUse1" in error[1]):
        return f"eager PyTorch with torchax imported says {error}"
    return None


HARMS: dict[str, Harm] = {
    "computes_in_half": computes_in_half,
    "differs": differs,
    "fails_beside_torchax": fails_beside_torchax,
    "forgets": forgets,
    "freezes": freezes,
    "gradient_flows": gradient_flows,
    "ignores_autocast": ignores_autocast,
    "keeps_activations": keeps_activations,
    "leaks": leaks,
    "needs_cuda": needs_cuda,
    "prints": prints,
    "repeats": repeats,
    "retraces": retraces,
    "second_trace_differs": second_trace_differs,
    "trains_frozen": trains_frozen,
    "unrolls": unrolls,
}
