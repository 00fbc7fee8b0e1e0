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


HARMS: dict[str, Harm] = {"differs": differs, "repeats": repeats}
