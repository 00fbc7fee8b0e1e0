"""Gradients of a port beside those of eager PyTorch."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from tpuport.foundation import pytree
from tpuport.foundation.interop import backend
from tpuport.foundation.patching.shim import installed
from tpuport.model.parity.call import Call
from tpuport.model.parity.same_numbers import DrewInBackward
from tpuport.model.parity.structure import Pair, comparable
from tpuport.model.parity.uncheckpointed import ReentrantBackward
from tpuport.model.parity.verify import Reference, Verifier
from tpuport.reports.records import Kind
from tpuport.tracing.core.gradient_paths import as_torch, kept_value_and_grad, value_and_grad
from tpuport.tracing.core.reentrancy import comparing_gradients
from tpuport.tracing.core.storage import differentiable
from tpuport.tracing.scan_layers import stacked_params

# So many bytes of numbers are kept of a program whose gradients are compared.
_MOST_KEPT = 1 << 30
# Blocks that are entered, of any thread: a script may run its steps on another one.
_LEFT_OUT: list[None] = []


@contextlib.contextmanager
def left_out() -> Iterator[None]:
    """Let calls under `porting()` in the block compare no gradients: something else does."""
    _LEFT_OUT.append(None)
    try:
        yield
    finally:
        _LEFT_OUT.pop()


def are_left_out() -> bool:
    """Return whether gradients are compared by something else."""
    return bool(_LEFT_OUT)


def projection(shape: Sequence[int], index: int) -> np.ndarray:
    """Return fixed random weights for an output, so that one gradient checks all its elements."""
    draw = np.asarray(np.random.default_rng(index).standard_normal(tuple(shape)))
    return np.asarray(draw / max(draw.size, 1) ** 0.5, np.float32)


def projected(out: Any) -> list[torch.Tensor]:
    """Return a weighted sum for each result that has a graph."""
    return [
        (_real(leaf) * torch.from_numpy(projection(leaf.shape, i)).to(leaf.dtype.to_real())).sum()
        for i, leaf in enumerate(pytree.flatten(out)[0])
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad and differentiable(leaf.dtype)
    ]


def _real(value: Any) -> Any:
    """Return a complex value's parts added up, with factors that tell them apart."""
    is_tensor = isinstance(value, torch.Tensor)
    is_complex = value.is_complex() if is_tensor else jnp.iscomplexobj(value)
    return value.real + 0.5 * value.imag if is_complex else value


def refused(expected: Reference) -> dict[int, RuntimeError]:
    """Return what eager raises for the gradient of each result that may have one, by its number.

    An example is a value that was written in place after an operation kept it for backward.
    """
    leaves = [leaf for leaf in pytree.flatten(expected.out)[0] if isinstance(leaf, torch.Tensor)]
    trained = [p for p in expected.parameters().values() if p.requires_grad]
    found: dict[int, RuntimeError] = {}
    for index, leaf in enumerate(leaf for leaf in leaves if differentiable(leaf.dtype)):
        if leaf.requires_grad:
            try:
                total = _real(leaf).sum()
                with _grads_left(trained):
                    torch.autograd.grad(total, trained, retain_graph=True, allow_unused=True)
            except RuntimeError as error:
                found[index] = error
    return found


def of_reference(
    found: Reference, *, keep: bool = False, state: Sequence[torch.Tensor] = ()
) -> dict[str, torch.Tensor | None]:
    """Return eager's gradients of `projected`, by parameter.

    There are none if no result has a graph, or if a backward draws random numbers. `keep` keeps the
    graph for another pass; `state` is what the call left in the module, which counts too.
    """
    if found.module is None:
        return {}
    numbers = contextlib.nullcontext() if found.numbers is None else found.numbers.of_backward()
    try:
        with numbers:
            sums = projected(found.out) + projected(list(state))
            return of_sums(sums, found, keep=keep)
    except DrewInBackward:
        return {}


def of_sums(
    sums: list[torch.Tensor], found: Reference, *, keep: bool = False
) -> dict[str, torch.Tensor | None]:
    """Return the gradients of sums by parameter, None for one that they do not depend on."""
    trained = {name: p for name, p in found.parameters().items() if p.requires_grad}
    if not sums or not trained:
        return dict.fromkeys(trained)
    with comparing_gradients(), _grads_left(trained.values()) as left:
        # Without the other leaves autograd leaves out what leads to them alone, as the custom
        # backward of a reversible layer does whose input is the user's.
        others = _other_leaves(sums, set(trained.values()))
        made = torch.autograd.grad(
            sums, [*trained.values(), *others], allow_unused=True, retain_graph=keep
        )
    own = made[: len(trained)]
    given = ([g for g in pair if g is not None] for pair in zip(own, left, strict=True))
    return {n: sum(some) if some else None for n, some in zip(trained, given, strict=True)}  # pyright: ignore[reportReturnType]


@contextlib.contextmanager
def _grads_left(trained: Collection[torch.Tensor]) -> Iterator[list[torch.Tensor | None]]:
    """Yield a list that gets what the block adds to each `.grad`, which is then as it was before.

    A custom backward may run `backward()`, as reversible layers and reentrant checkpointed blocks
    do.
    """
    left: list[torch.Tensor | None] = []
    before = [p.grad for p in trained]
    for p in trained:
        p.grad = None
    try:
        with installed((ReentrantBackward,)):
            yield left
        left += [p.grad for p in trained]
    finally:
        for p, grad in zip(trained, before, strict=True):
            p.grad = grad


def _other_leaves(
    sums: Sequence[torch.Tensor], trained: Collection[torch.Tensor]
) -> list[torch.Tensor]:
    """Return what `backward()` would give a gradient besides what is trained."""
    found: dict[torch.Tensor, None] = {}
    seen, queue = set(), [one.grad_fn for one in sums]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and leaf not in trained:
            found[leaf] = None
        queue.extend(following for following, _ in node.next_functions)
    return list(found)


def of_port(
    verifier: Verifier, call: Call, names: Collection[str]
) -> tuple[dict[str, jax.Array | None], set[str]]:
    """Return the port's gradients of the sums of `projected`, by parameter.

    Return too the names of those that may be zeros where eager PyTorch has None.
    """
    ported = verifier.ported
    rest = {name: value for name, value in call.state.items() if name not in names}

    def loss(params: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        result, _ = ported.apply(
            params, rest, call.key, *call.args, method=call.method, **call.kwargs
        )
        leaves = enumerate(pytree.flatten(result, leaf=comparable)[0])
        floats = ((i, _real(v)) for i, v in leaves if jnp.issubdtype(v.dtype, jnp.inexact))
        sums = (jnp.sum(v * projection(v.shape, i).astype(v.dtype)) for i, v in floats)
        return sum(sums, jnp.zeros(())), None

    with ported._precision_scope():
        of = {name: call.state[name] for name in names}
        made, has_gradient, verifier.kept = differentiated(loss)(of)
    return by_parameter(made, has_gradient)


def differentiated(loss: Callable[..., Any], options: Any = None) -> Callable[..., Any]:
    """Return a program of the gradients of a loss, which are compared.

    It returns them, what `value_and_grad` says of them, and what their backward pass is given: on
    the host, whose memory holds the same of eager PyTorch, and there all masks and not too many
    numbers. On an accelerator it would take memory that the program itself may need.
    """
    if jax.default_backend() != "cpu":
        plain = jax.jit(value_and_grad(loss), compiler_options=options)
        return lambda params: (*plain(params)[1:], [])

    def kept(params: Any) -> Any:
        _, made, has_gradient, arrays = kept_value_and_grad(loss)(params)
        masks = [one for one in arrays if one.dtype == jnp.bool_]
        numbers = [one for one in arrays if jnp.issubdtype(one.dtype, jnp.floating)]
        few = sum(one.nbytes for one in numbers) <= _MOST_KEPT
        return made, has_gradient, masks + (numbers if few else [])

    return jax.jit(kept, compiler_options=options)


def by_parameter(made: Any, has_gradient: Any) -> tuple[dict[str, jax.Array | None], set[str]]:
    """Return what `value_and_grad` gives as `of_port` does."""
    # A stack has a gradient where one of its members has.
    reached, unsure = (
        {name for stack in made if test(stack) for name in _members(stack)}
        for test in (lambda n: bool(has_gradient[n]), has_gradient.unsure.__contains__)
    )
    found = as_torch(stacked_params.unstack(made)).items()
    return {name: value if name in reached else None for name, value in found}, unsure


def _members(name: str) -> Sequence[str]:
    return stacked_params.members_of(name) or [name]


def paired(
    want: Mapping[str, Any], have: Mapping[str, Any], unsure: Collection[str] = ()
) -> list[tuple[Kind, Pair]]:
    """Pair gradients by name; None is not like zeros, but for a name that is `unsure`.

    Nothing is paired if eager PyTorch has no gradients to compare with (`of_reference`).
    """
    made = []
    for name, got in have.items() if want else ():
        if name in unsure and want.get(name) is None and got is not None and not got.any():
            continue
        made.append(_pair(f"grad.{name}", want.get(name), got))
    return [("gradient", pair) for pair in made if pair is not None]


def _pair(path: str, want: Any, have: Any) -> Pair | None:
    if want is None and have is None:
        return None
    if want is not None and have is not None:
        if isinstance(have, jax.Array):
            have = have.astype(backend.jax_dtype(want.dtype))
        return Pair(path, want, have)
    what = " and ".join(
        f"{side} {'leaves it at None' if value is None else 'gives a gradient'}"
        for side, value in (("eager PyTorch", want), ("the port", have))
    )
    return Pair(path, problem=f"{what} (an optimizer moves a parameter only if it has one)")
