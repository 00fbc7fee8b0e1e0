"""Choice of what gradients of a ported model recompute, by module."""

from collections.abc import Mapping

import torch

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop import name_patterns
from tpuport.foundation.reporting.markup import plural
from tpuport.model.ported_model import PortedModel
from tpuport.tracing.core.context import no_policy
from tpuport.tracing.core.remat_policy import PolicyTable


class RematPlan(dict[str, str]):
    """The policy of each module that is a checkpoint region, by fqn."""

    def __str__(self) -> str:
        found: dict[tuple[str, str], int] = {}
        for fqn, policy in self.items():
            key = (name_patterns.generalised(fqn) or "the whole model", policy)
            found[key] = found.get(key, 0) + 1
        lines = [f"{name}: {policy} ({plural(n, 'module')})" for (name, policy), n in found.items()]
        return "\n".join(lines) or "nothing is computed again"


def remat(ported: PortedModel, policies: Mapping[str, str] | str) -> RematPlan:
    """Choose what gradients of a ported model keep of the forward pass; values stay the same.

    Args:
        ported: The result of `tpuport.convert`.
        policies: Names of policies by pattern of module fqns; the first that matches decides.
            A module inside a matching one follows it. A single name applies to every block: each
            module of a `ModuleList` or `Sequential` that is not inside another.

            "none" keeps everything that the backward pass needs; "full" keeps the module's inputs
            and computes the rest again; "dots" keeps the results of products with weights too
            (`jax.checkpoint_policies.dots_with_no_batch_dims_saveable`), and of attention by a
            kernel; "offload" is "full" with the inputs in host memory until they are needed;
            "dots_offload" keeps the inputs on the device, and those results in host memory.

    Returns:
        The modules that are computed again, with their policies.

    Raises:
        UsageError: A pattern matches no module, or a policy has an unknown name.
    """
    if not isinstance(ported, PortedModel):
        raise UsageError(
            f"Expected what tpuport.convert(model) gives, got a {type(ported).__name__}"
        )
    names = [fqn for fqn, _ in ported._module.named_modules()]
    if isinstance(policies, str):
        policies = dict.fromkeys(_blocks(ported._module), policies)
        if not policies:
            raise UsageError(
                f"{type(ported._module).__name__} has no ModuleList or Sequential, so it has no"
                " blocks to be found; name its modules: {'encoder.*': 'full'}"
            )
    table = PolicyTable(policies)
    name_patterns.refuse_unmatched(policies, names, f"module of {type(ported._module).__name__}")
    plan = RematPlan()
    for fqn in names:
        policy = table(fqn)
        if policy is not None and not any(_is_inside(fqn, outer) for outer in plan):
            plan[fqn] = policy
    ported._reconfigure(remat=table if plan else no_policy)
    return plan


def _is_inside(fqn: str, outer: str) -> bool:
    return fqn.startswith(f"{outer}.") or not outer


def _blocks(module: torch.nn.Module) -> list[str]:
    """Return a pattern for the modules of each list of modules that is not inside another."""
    lists = (torch.nn.ModuleList, torch.nn.Sequential)
    found: list[str] = []
    for fqn, owner in module.named_modules():
        if isinstance(owner, lists) and not any(_is_inside(fqn, outer) for outer in found):
            found.append(fqn)
    return [f"{fqn}.*" if fqn else "*" for fqn in found]
