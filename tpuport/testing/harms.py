"""What plain torchax does to code that it runs without an error: the harm an example declares.

Each function takes the example's `forward` and a list of arguments for each seed, and says what it
saw: None if the harm is there, else the reason why the example no longer shows it.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tpuport.testing.equivalence import Inputs, compare, difference, observe, plain_jit

Harm = Callable[[Callable[..., Any], Sequence[Inputs]], str | None]


def differs(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """A silently wrong result: not what eager PyTorch gives for some of the inputs."""
    for args in inputs:
        expected = observe(function, args)
        got = observe(lambda *args: plain_jit(function, args), args)
        if got.error is not None:
            return f"plain torchax raises {got.error[0].__name__} instead"
        if difference(expected.value, got.value, rtol=1e-4) is not None:
            return None
    return "plain torchax gives what eager PyTorch gives"


def repeats(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Random numbers that are drawn once, when the program is traced, and then stay."""
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
        moved = interop.jax_view(
            tuple(arg.to("jax") if isinstance(arg, torch.Tensor) else arg for arg in args)
        )
        results = [[leaf.tolist() for leaf in jax.tree.leaves(jitted(*moved))] for _ in range(2)]
    return None if results[0] == results[1] else "two calls of the program differ"


def prints(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """Text about a tensor that shows no value: it was made when the program was traced."""
    expected = observe(function, inputs[0])
    got = observe(lambda *args: plain_jit(function, args), inputs[0])
    if got.error is not None:
        return f"plain torchax raises {got.error[0].__name__} instead"
    return None if "Tracer" in got.printed and expected.printed else "the same is printed"


def unrolls(function: Callable[..., Any], inputs: Sequence[Inputs]) -> str | None:
    """A program that is longer when a dimension of its first input is twice as long."""
    args = inputs[0]
    first, *others = args
    short = program_length(function, args)
    for dim in range(first.ndim):
        longer = (torch.cat([first, first], dim), *others)
        if observe(function, longer).error is None and program_length(function, longer) > short:
            return None
    return f"the program always has {short} operations"


def program_length(function: Callable[..., Any], args: Inputs) -> int:
    """The number of operations of a function's program under plain torchax."""
    import jax
    import torchax
    from torchax import interop

    with warnings.catch_warnings(), torchax.default_env():
        warnings.simplefilter("ignore")
        moved = tuple(arg.to("jax") if isinstance(arg, torch.Tensor) else arg for arg in args)
        program = jax.make_jaxpr(interop.jax_view(function))(*interop.jax_view(moved))
    return len(program.eqns)


HARMS: dict[str, Harm] = {
    "differs": differs,
    "prints": prints,
    "repeats": repeats,
    "unrolls": unrolls,
}
