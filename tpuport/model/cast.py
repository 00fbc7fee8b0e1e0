"""Application of a dtype policy to a ported model."""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop import backend
from tpuport.foundation.interop.dtypes import torch_dtype
from tpuport.foundation.reporting.markup import plural
from tpuport.model.ported_model import PortedModel
from tpuport.tracing.precision.apply import Casting, cast_module
from tpuport.tracing.precision.policy import Decision, DtypePolicy, as_policy
from tpuport.tracing.scan_layers import stacked_params


@dataclass(frozen=True)
class CastReport:
    """The decisions of `tpuport.cast`.

    Attributes:
        model: The class of the model.
        casting: The dtypes in the program and between calls, by name.
        decisions: The dtype of each floating parameter and buffer, and why it is not the policy's.
        parameters: The names of those that are parameters.
    """

    model: str
    casting: Casting
    decisions: dict[str, Decision]
    parameters: frozenset[str]

    @property
    def kept(self) -> dict[str, Decision]:
        """Return the parameters and buffers that do not have the compute dtype."""
        compute = self.casting.compute
        return {name: one for name, one in self.decisions.items() if one.dtype != compute}

    def __str__(self) -> str:
        casting = self.casting
        groups: dict[tuple[torch.dtype, bool, str], list[str]] = {}
        for name, one in self.decisions.items():
            is_parameter = name in self.parameters
            key = (one.dtype, is_parameter, (one.why or "") if is_parameter else "")
            groups.setdefault(key, []).append(name)
        outputs = "as computed" if casting.outputs is None else f"in {_short(casting.outputs)}"
        lines = [f"{self.model} computes in {_short(casting.compute)}, results {outputs}"]
        for (dtype, is_parameter, why), names in groups.items():
            held = {casting.held.get(name, dtype) for name in names} - {dtype}
            what = plural(len(names), "parameter" if is_parameter else "buffer")
            note = f"  held in {', '.join(map(_short, held))}" if held else ""
            shown = f"  {why}: {names[0]}{', ...' if len(names) > 1 else ''}" if why else ""
            lines.append(f"  {_short(dtype):9} {what}{note}{shown}")
        return "\n".join(lines)


def _short(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def cast(ported: PortedModel, policy: DtypePolicy | str = "bf16") -> CastReport:
    """Let a ported model hold its parameters and compute in other dtypes, bfloat16 in particular.

    Float32 and the compute dtype may meet in a layer or product, which PyTorch refuses outside of
    autocast. A layer then computes in the dtype of its weight, any other product in the compute
    dtype. Norms, softmax and losses compute in float32 inside. All other ops are as in PyTorch for
    these dtypes. Arguments are not cast. Calls are compared with eager PyTorch under the same
    policy; `tpuport.convert` checks the model without it.

    Args:
        ported: The result of `tpuport.convert`; weights may be shapes.
        policy: A `DtypePolicy`, "bf16", or "bf16_master" (float32 parameters, cast in the program).

    Returns:
        The decisions, to print.

    Raises:
        UsageError: A function was ported, a pattern matches nothing, or a weight does not fit.
    """
    if not isinstance(ported, PortedModel):
        raise UsageError(
            f"Expected what tpuport.convert(model) gives, got a {type(ported).__name__}"
        )
    policy = as_policy(policy)
    known, master = ported._tracer.casting, ported._module
    if known.before is None:
        floating = (
            p.dtype for p in torch.nn.Module.parameters(master) if p.dtype.is_floating_point
        )
        before = next(floating, torch.get_default_dtype())
    else:
        before = known.before
    decisions = policy.decide(master)
    inside = {name: one.dtype for name, one in decisions.items()}
    parameters = frozenset(
        name for name in inside if name in dict(torch.nn.Module.named_parameters(master))
    )
    held = dict(inside)
    if policy.weights is not None:
        held |= dict.fromkeys(parameters, torch_dtype(policy.weights))
    values = {n: _converted(n, v, _held(n, held)) for n, v in ported._values().items()}
    outputs = before if policy.outputs == "restore" and before != policy.dtype else None
    casting = Casting(policy.dtype, inside, held, outputs, before)
    ported._reconfigure(casting=casting, master=cast_module(master, inside))
    ported.params = {name: values.get(name, value) for name, value in ported.params.items()}
    ported.buffers = {name: values.get(name, value) for name, value in ported.buffers.items()}
    return CastReport(type(master).__name__, casting, decisions, parameters)


def _held(name: str, held: dict[str, torch.dtype]) -> torch.dtype | None:
    """Return the dtype in which a parameter, buffer or stack is held; None leaves it unchanged.

    Raises:
        UsageError: The parameters in a stack differ.
    """
    found = {held.get(member) for member in stacked_params.members_of(name) or [name]}
    if len(found) > 1:
        raise UsageError(
            f"{name!r} is one array of blocks that the policy gives different dtypes; call"
            " tpuport.cast before tpuport.stack_blocks"
        )
    return found.pop()


def _converted(name: str, value: Any, dtype: torch.dtype | None) -> Any:
    """Return a parameter or buffer in another dtype, on the same devices.

    Raises:
        UsageError: A finite value would become infinite.
    """
    target = value.dtype if dtype is None else backend.jax_dtype(dtype)
    if value.dtype == target:
        return value
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, target, sharding=value.sharding)
    made, overflows = _checked(value, target)
    if bool(overflows):
        raise UsageError(
            f"{name!r} has a value that does not fit in {_short(dtype)}; keep its dtype:"
            f" DtypePolicy(dtypes={{{name!r}: None}})"
        )
    return made


@partial(jax.jit, static_argnums=1)
def _checked(value: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return a value in another dtype, and whether a finite element became infinite.

    One program for each shape, where one for each operation would be five.
    """
    made = value.astype(dtype)
    return made, jnp.any(jnp.isinf(made) & jnp.isfinite(value))
