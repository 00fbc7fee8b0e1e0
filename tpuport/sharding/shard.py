"""Placement of a ported model on a mesh."""

import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpuport.foundation.errors import UsageError
from tpuport.foundation.reporting.markup import plural
from tpuport.model.ported_model import PortedModel
from tpuport.sharding.mesh import MeshAxis, make_mesh, sizes_of
from tpuport.sharding.mixed_axes import mixes_axes
from tpuport.sharding.plan import ShardingPlan
from tpuport.sharding.rule_table import ShardingRules
from tpuport.sharding.specs import axes_of, fitted, shown
from tpuport.sharding.strategies import PRESETS, preset
from tpuport.sharding.topology import is_described
from tpuport.tracing.scan_layers import stacked_params

SEQUENCE = MeshAxis.SEQUENCE.value
_PARTS = re.compile(r"[.\[\]'\"]+")


class ShardingWarning(UserWarning):
    """The sharding rules look unintended. Results are still correct."""


def shard(
    ported: PortedModel,
    mesh: Mesh | Mapping[str, int],
    rules: Any = "fsdp",
    *,
    inputs: Any = None,
    strict: bool = False,
) -> ShardingPlan:
    """Shard a ported model over a mesh. Later calls run there, with equal results.

    Args:
        ported: ported model; its `params` and `buffers` are put on the mesh. A model converted on
            the meta device gets shapes with shardings instead.
        mesh: a mesh, or sizes for `tpuport.sharding.make_mesh`.
        rules: `ShardingRules`, anything that they are made from, or the name of a preset.
        inputs: specs of a call's arguments by pattern of their name (a positional one's name is its
            number), or one spec for all, instead of the rules'. Axes that do not divide a dim, and
            dims that an argument lacks, are left out.
        strict: raise findings of the plan instead of warning about them.

    Returns:
        The plan, to print or to open as a page; also `ported.sharding`.

    Raises:
        UsageError: `strict` is set and the plan has findings; or the devices are only described.
    """
    if not isinstance(ported, PortedModel):
        raise UsageError(
            f"Expected what tpuport.convert(model) gives, got a {type(ported).__name__}"
        )
    mesh = mesh if isinstance(mesh, Mesh) else make_mesh(mesh)
    table = as_rules(rules, ported, mesh)
    if inputs is not None:
        given = {"**": inputs} if isinstance(inputs, P | str) else inputs
        table = ShardingRules(table, name=table.name, inputs=given, activations=table.activations)
    plan = table.plan(ported, mesh)
    if strict:
        plan.check()
    elif plan.findings:
        warnings.warn(
            f"{plural(len(plan.findings), 'finding')} about the sharding of {plan.model}, first:"
            f" {plan.findings[0]}. What to do: print what tpuport.shard() returns, or pass"
            " strict=True to have them raised",
            ShardingWarning,
            stacklevel=2,
        )
    placement = OnMesh(mesh, table, table.shardings(ported, mesh), plan)
    _put(ported, placement)
    return plan


def shard_like(
    made: PortedModel, model: Any, change: Callable[..., ShardingRules] | None = None
) -> None:
    """Shard a port that was made from another as that one is, if it is.

    A preset is made anew, since the layers of the two may differ, and changed by what `change`
    returns for the port, the mesh and the table; other tables are taken as they are.
    """
    placement = model._placement if isinstance(model, PortedModel) else None
    if not isinstance(placement, OnMesh):
        return
    table = placement.rules
    if table.name in PRESETS:
        fresh = preset(table.name, made, placement.mesh)
        table = ShardingRules(
            fresh, name=table.name, inputs=table.inputs, activations=fresh.activations
        )
        table = table if change is None else change(made, placement.mesh, table)
    with warnings.catch_warnings():
        # The other port's sharding has told them.
        warnings.simplefilter("ignore", ShardingWarning)
        shard(made, placement.mesh, table)


def as_rules(rules: Any, model: Any, mesh: Mesh | Mapping[str, int]) -> ShardingRules:
    """Return a table, given itself, by a preset's name, or by what it is made from."""
    if isinstance(rules, ShardingRules):
        return rules
    return preset(rules, model, mesh) if isinstance(rules, str) else ShardingRules(rules)


def _put(ported: PortedModel, placement: "OnMesh") -> None:
    """Move the state one array at a time, so that little of it is held twice."""
    stacked_params.refuse_stacks(ported._values(), "spreading it over a mesh")
    described = is_described(placement.mesh.devices.flat[0])
    if described and not all(
        isinstance(value, jax.ShapeDtypeStruct) for value in ported._values().values()
    ):
        raise UsageError(
            "the mesh is of a TPU that is only described, so no weights can be put there. What to"
            " do: convert a model made under torch.device('meta'), or use rules.plan(model, mesh)"
        )
    for target in (ported.params, ported.buffers):
        for name in list(target):
            target[name] = _placed(target[name], placement.shardings[name])
    ported._reconfigure(placement=placement)


def _placed(value: Any, sharding: NamedSharding) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    return jax.device_put(value, sharding)


class OnMesh:
    """The shardings of one ported model's state, arguments and activations on a mesh.

    A `tpuport.tracing.core.sharding_constraints.Placement`.
    """

    def __init__(
        self,
        mesh: Mesh,
        rules: ShardingRules,
        shardings: dict[str, NamedSharding],
        plan: ShardingPlan,
    ) -> None:
        self.mesh: Mesh = mesh
        self.rules, self.shardings, self.plan = rules, shardings, plan
        self._whole = NamedSharding(mesh, P())
        self._sizes = sizes_of(mesh)
        self._told: set[Any] = set()
        self.mixes_axes = mixes_axes(
            [sharding.spec for sharding in shardings.values()],
            [rule.spec for rule in rules.inputs],
            [*rules.activations.outputs.values(), *rules.activations.inputs.values()],
            self._sizes,
        )

    @property
    def constrains(self) -> bool:
        """Return whether any activation has a sharding constraint."""
        return bool(self.rules.activations)

    @property
    def platform(self) -> str:
        """Return the platform of its devices."""
        return self.mesh.devices.flat[0].platform

    def arguments(self, values: list[Any], paths: list[str]) -> list[Any]:
        """Put the arguments of a call on the mesh; those already on it keep their sharding."""
        return [self._argument(*pair) for pair in zip(values, paths, strict=True)]

    def _argument(self, value: Any, path: str) -> Any:
        if isinstance(value, jax.core.Tracer) or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            return value
        there = getattr(value, "sharding", None)
        if isinstance(there, NamedSharding) and there.mesh == self.mesh:
            return value
        return _placed(value, NamedSharding(self.mesh, self.input_spec(path, value.shape)))

    def input_spec(self, path: str, shape: tuple[int, ...]) -> P:
        """Return the spec of an argument, fitted to its shape."""
        name = argument_name(path)
        rule = next((rule for rule in self.rules.inputs if rule.matches(name)), None)
        return P() if rule is None else fitted(rule.spec[: len(shape)], shape, self._sizes)[0]

    def constants(self, values: list[jax.Array]) -> list[jax.Array]:
        """Replicate a program's large constants over the mesh: they move once, not at each call."""
        if is_described(self.mesh.devices.flat[0]):
            return values
        return [jax.device_put(value, self._whole) for value in values]

    def state(self, values: dict[str, Any]) -> dict[str, Any]:
        """Constrain a program's new state to the shardings of the old one, to compile only once."""
        return {
            name: jax.lax.with_sharding_constraint(value, self._sharding(name))
            for name, value in values.items()
        }

    def _sharding(self, name: str) -> NamedSharding:
        """Return the sharding of a parameter or buffer; the first dim of a stack is unsharded."""
        members = stacked_params.members_of(name)
        if not members:
            return self.shardings.get(name, self._whole)
        spec = self.shardings.get(members[0], self._whole).spec
        return NamedSharding(self.mesh, P(None, *spec))

    def spec(self, module: str, side: str, ndim: int) -> P | None:
        """Return the spec that the rules name for a module's input or output."""
        return self.rules.activations.full_spec(module, side, ndim)

    def activation(self, module: str, side: str, value: jax.Array) -> jax.Array:
        """Return a module's input or output with its sharding constraint."""
        spec = self.spec(module, side, value.ndim)
        if spec is None:
            return value
        kept, lost = fitted(spec, value.shape, self._sizes)
        if any(self._is_long(value.shape[dim], axes) for dim, axes in lost):
            return self._unevenly(spec, value)
        if lost and not self.rules.activations.is_quiet(module, side):
            self._tell(module, side, spec, value.shape, lost)
        return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, kept))

    def _is_long(self, length: int, axes: tuple[str, ...]) -> bool:
        """Return whether a dim that the axes do not divide holds tokens, enough for each chip."""
        return axes == (SEQUENCE,) and length >= self._sizes[SEQUENCE]

    def _unevenly(self, spec: P, value: jax.Array) -> jax.Array:
        """Shard tokens over chips that do not divide them.

        jax refuses such a sharding, but XLA has it. So the tokens are padded, constrained and
        sliced again, and the partitioner neither computes nor sends the padding. Unsharded, every
        chip would do all of the work (480p of HunyuanVideo: four times the products).
        """
        shape = list(value.shape)
        for dim, part in enumerate(spec):
            if SEQUENCE in axes_of(part):
                shards = math.prod(self._sizes.get(axis, 1) for axis in axes_of(part))
                shape[dim] += -shape[dim] % shards
        pads = [(0, after - before, 0) for before, after in zip(value.shape, shape, strict=True)]
        padded = jax.lax.pad(value, jnp.zeros((), value.dtype), pads)
        place = NamedSharding(self.mesh, fitted(spec, shape, self._sizes)[0])
        padded = jax.lax.with_sharding_constraint(padded, place)
        return jax.lax.slice(padded, [0] * value.ndim, value.shape)

    def _tell(self, module: str, side: str, spec: P, shape: Any, lost: Any) -> None:
        key = (module, side, shape)
        if key in self._told:
            return
        self._told.add(key)
        dim, axes = lost[0]
        warnings.warn(
            f"dim {dim} of the {side} of {module or 'the model'} has size {shape[dim]}, which"
            f" {' x '.join(f'{a}={self._sizes[a]}' for a in axes)} does not divide"
            f" ({shown(spec)}): it stays unsharded along {' and '.join(axes)}",
            ShardingWarning,
            stacklevel=2,
        )

    def place(self, name: str, struct: jax.ShapeDtypeStruct) -> NamedSharding:
        """Return the sharding of one parameter or buffer, to load it straight to its chips."""
        del struct
        return self.shardings.get(name, self._whole)


def argument_name(path: str) -> str:
    """Return an argument's dotted name: path `[1]['mask'][0]` of (args, kwargs) is `mask.0`."""
    parts = [part for part in _PARTS.split(path) if part]
    return ".".join(parts[1:])
