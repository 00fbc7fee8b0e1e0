"""Runtime of rewritten code that plain torchax traces under `jax.jit`, without `convert`.

Checks are dropped unless `tpuport.ops.debug_checks` is on: without `convert` there is no wrapper
that could raise an exception in the caller of a program.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torchax

from tpuport.foundation import pytree
from tpuport.ops.torchax.debug_checks import are_checks_on
from tpuport.ops.torchax.sides import Sides
from tpuport.ops.torchax.values import array_of, is_leaf, is_number, kind_of, number_of, truth, wrap
from tpuport.tracing.core.errors import port_error


def traced_not(value: torch.Tensor) -> torch.Tensor:
    """Return `not t` of a traced tensor."""
    return number_of(~truth(value), bool)


def traced_check(test: torch.Tensor, make_error: Callable[[], BaseException | None]) -> None:
    """Run `if test: raise make_error()` inside the program, if debug checks are on."""
    error = make_error() if are_checks_on() else None
    if error is None:
        return

    def fail(failed: Any) -> None:
        if failed:
            raise error

    jax.debug.callback(fail, truth(test))


def traced_cond(
    test: torch.Tensor, then: Callable[..., Any], orelse: Callable[..., Any], operands: Any
) -> Any:
    """Return `then(*operands) if test else orelse(*operands)`, computed by `lax.cond`.

    Raises:
        PortError: The sides differ in structure, shapes, dtypes or Python values.
    """
    return Sides(then, orelse, operands).select(truth(test))


def traced_while(
    test: Callable[..., Any], body: Callable[..., Any], operands: tuple[Any, ...]
) -> tuple[Any, ...]:
    """Run `while test(*operands): operands = body(*operands)` as `lax.while_loop`.

    Raises:
        PortError: A loop variable changes its structure, shape or dtype.
    """
    leaves, spec = pytree.flatten(operands, leaf=is_leaf)
    numbers = [is_number(leaf) for leaf in leaves]
    start = [_carried(leaf) for leaf in leaves]
    environment = torchax.default_env()

    def variables(values: list[jax.Array]) -> Any:
        made = [wrap(value) for value in values]
        return pytree.unflatten(spec, made), made

    def holds(carried: tuple[list[jax.Array], jax.Array]) -> jax.Array:
        arguments, _ = variables(carried[0])
        with environment.override_property(prng=jax.random.fold_in(carried[1], 2)):
            again = test(*arguments)
        return truth(again) if isinstance(again, torch.Tensor) else jnp.asarray(bool(again))

    def step(carried: tuple[list[jax.Array], jax.Array]) -> Any:
        nonlocal draws
        values, key = carried
        arguments, made = variables(values)
        with environment.override_property(prng=key):
            found, after = pytree.flatten(tuple(body(*arguments)), leaf=is_leaf)
            draws = environment.prng_key is not key
            key = environment.prng_key
        written = [t for t, v in zip(made, values, strict=True) if t.jax() is not v]
        if after.key != spec.key or any(all(t is not f for f in found) for t in written):
            raise _not_carried("changes Python values or tensors that it does not carry")
        pairs = zip(found, values, numbers, strict=True)
        return [_matching(leaf, value, number) for leaf, value, number in pairs], key

    draws = False
    key = jax.random.fold_in(environment.prng_key, 1)
    final, _ = jax.lax.while_loop(holds, step, (start, key))
    if draws:
        environment.get_and_rotate_prng_key()
    return variables(final)[0]


def _carried(leaf: Any) -> jax.Array:
    if isinstance(leaf, torch.Tensor):
        return array_of(leaf)
    return number_of(leaf, type(leaf)).jax()


def _matching(leaf: Any, value: jax.Array, is_counted: bool) -> jax.Array:
    """Return a value after one round in the dtype that the loop carries."""
    new = _carried(leaf)
    if new.dtype != value.dtype or new.shape != value.shape:
        raise _not_carried(
            f"turns a value that it carries from {value.dtype}{list(value.shape)} into"
            f" {new.dtype}{list(new.shape)}"
        )
    if is_counted:
        return number_of(new, kind_of(new.dtype)).jax()
    return new.astype(value.dtype)


def _not_carried(what: str) -> Exception:
    return port_error(
        f"the body of a while loop on a traced value {what}",
        code="TPU104",
        remedy="give each variable its final dtype and shape before the loop",
    )
