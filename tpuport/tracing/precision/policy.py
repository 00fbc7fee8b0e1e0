"""A dtype policy: the floating dtypes that parameters are held in and computed in."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tpuport.foundation.errors import UsageError
from tpuport.foundation.interop import name_patterns
from tpuport.foundation.interop.dtypes import Dtype, torch_dtype
from tpuport.tracing.state.module_state import state_tree

# Frequencies and tables of positions and noise levels that are parameters. In bfloat16's 8 bits of
# precision, neighbouring positions would be equal.
_TABLES = r"re:(.*\.)?(inv_freq|freqs(_\w+)?|rope(_\w+)?|rotary(_\w+)?|sigmas|timesteps)"
_BATCH_NORM = torch.nn.modules.batchnorm._BatchNorm
_KEPT = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


@dataclass(frozen=True)
class DtypePolicy:
    """The dtypes in which a ported model holds its parameters, computes and returns.

    Parameters get the compute dtype, except these, which stay in float32 or in their own dtype:

    - modules that classes of transformers and diffusers name in `_keep_in_fp32_modules` and
      `_keep_in_fp32_modules_strict`;
    - batch norms (their statistics move by small steps) and frozen tables of positions;
    - all buffers: tables of rotary embeddings, statistics, noise levels.

    Attributes:
        compute: The compute dtype: bfloat16, or another floating dtype.
        weights: The dtype that parameters are held in, and that an optimizer sees. None is the
            compute dtype; "float32" is for master weights, which are cast inside the program (their
            gradients are float32 too).
        dtypes: Dtypes by pattern of a parameter, a buffer or a module (then for all in it), before
            the exceptions above; None keeps the dtype. The first pattern that matches decides.
        outputs: "restore" casts results in the compute dtype to the dtype that the model's
            parameters had before; "computed" does not cast them. Tensors in objects that are
            neither dicts nor dataclasses (key-value caches) are never cast.
    """

    compute: Dtype = "bfloat16"
    weights: Dtype | None = None
    dtypes: Mapping[str, Dtype | None] = field(default_factory=dict)
    outputs: str = "restore"

    def __post_init__(self) -> None:
        for name, value in (("compute", self.compute), ("weights", self.weights)):
            if value is not None and not torch_dtype(value).is_floating_point:
                raise UsageError(f"{name} must be a floating dtype, got {value!r}")
        if self.outputs not in ("restore", "computed"):
            raise UsageError(f"outputs must be 'restore' or 'computed', got {self.outputs!r}")

    @property
    def dtype(self) -> torch.dtype:
        """Return the compute dtype."""
        return torch_dtype(self.compute)

    def decide(self, module: torch.nn.Module) -> dict[str, "Decision"]:
        """Return the dtype of each floating parameter and buffer by name, and why.

        Raises:
            UsageError: A pattern of `dtypes` matches nothing.
        """
        tree = state_tree(module)
        named = {n: t for n, t in tree.leaves.items() if n in tree.registered}
        owners = [fqn for fqn, _ in module.named_modules() if fqn]
        what = f"parameter, buffer or module of {type(module).__name__}"
        name_patterns.refuse_unmatched(self.dtypes, [*named, *owners], what)
        kept = dict(_kept_in_float32(module))
        whole = [f for f, m in module.named_modules() if isinstance(m, _BATCH_NORM)]
        return {
            name: self._decide(name, tensor, kept, whole)
            for name, tensor in named.items()
            if _is_cast(tensor)
        }

    def _decide(
        self, name: str, tensor: torch.Tensor, kept: Mapping[str, str], whole: list[str]
    ) -> "Decision":
        ancestors = [name, *_owners_of(name)]
        for pattern, dtype in self.dtypes.items():
            if any(name_patterns.matches(pattern, ancestor) for ancestor in ancestors):
                chosen = tensor.dtype if dtype is None else torch_dtype(dtype)
                return Decision(chosen, f"dtypes[{pattern!r}]")
        for pattern, why in kept.items():
            if any(name_patterns.matches(pattern, ancestor) for ancestor in ancestors):
                return Decision(torch.float32, why)
        if not isinstance(tensor, torch.nn.Parameter):
            return Decision(tensor.dtype, "a buffer")
        if name.rpartition(".")[0] in whole:
            return Decision(tensor.dtype, "a batch norm")
        if not tensor.requires_grad and name_patterns.matches(_TABLES, name):
            return Decision(tensor.dtype, "a table of positions")
        return Decision(self.dtype, None)


@dataclass(frozen=True)
class Decision:
    """The dtype of a parameter or buffer in the program; why, if it is not the policy's."""

    dtype: torch.dtype
    why: str | None


_NAMED = {
    "bf16": DtypePolicy(),
    "bf16_master": DtypePolicy(weights="float32"),
}


def as_policy(policy: Any) -> DtypePolicy:
    """Return a policy unchanged or by its name: "bf16", or "bf16_master" for float32 weights.

    Raises:
        UsageError: The argument is neither.
    """
    if isinstance(policy, DtypePolicy):
        return policy
    if isinstance(policy, str) and policy in _NAMED:
        return _NAMED[policy]
    names = " or ".join(map(repr, _NAMED))
    raise UsageError(f"expected a DtypePolicy, {names}, got {policy!r}")


def _is_cast(tensor: torch.Tensor) -> bool:
    """Return whether a policy casts a tensor: floating, and not 8-bit, whose scale is elsewhere."""
    return tensor.dtype.is_floating_point and tensor.dtype.itemsize >= 2


def _owners_of(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _kept_in_float32(module: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """Yield patterns for the parameters that transformers' and diffusers' classes keep in float32.

    An entry is one or several parts of a dotted name, as in transformers. Submodules have their
    own entries, for what is below them.
    """
    for fqn, owner in module.named_modules():
        for attribute in _KEPT:
            entries = getattr(owner, attribute, None)
            if isinstance(entries, str):
                entries = [entries]
            if not isinstance(entries, (list, tuple, set, frozenset)):
                continue
            for entry in sorted(entries):
                start = f"{fqn}." if fqn else ""
                yield f"{start}**.{entry}", f"{type(owner).__name__}.{attribute}"
