"""Shardings of torch_xla's SPMD that become `tpuport.shard` of the model of a moved step."""

from collections.abc import Iterable, Mapping

import libcst as cst
import libcst.matchers as m

from tpuport.migrate.api_calls import CALL
from tpuport.migrate.project import ClassPlace, Project
from tpuport.migrate.source_file import (
    Edits,
    Note,
    SourceFile,
    argument,
    own_attribute,
    parsed,
    parsed_statements,
    statement_of,
)
from tpuport.migrate.training_steps import MovedStep

_LOADER = "torch_xla.distributed.parallel_loader.MpDeviceLoader"
_SPEC = "torch_xla.distributed.spmd.ShardingSpec"
_SHARD = """
def port_model(self):
    ported = super().port_model()
    tpuport.shard(ported, **self.sharding)
    return ported
"""


def plan_spreading(
    project: Project, edits: Mapping[SourceFile, Edits], steps: Iterable[MovedStep]
) -> None:
    """Plan `tpuport.shard` for each class that extends one with a moved step and splits batches."""
    moved = [step.parts.place.node for step in steps]
    for place in project.classes.values():
        bases = project.bases(place)[1:]
        has_step = any(base.node in moved or "port_model" in base.methods() for base in bases)
        if place.file in edits and has_step and "port_model" not in place.methods():
            _plan_class(place, edits[place.file])


def _plan_class(place: ClassPlace, edits: Edits) -> None:
    file = place.file
    found = [line for line in file.all(cst.SimpleStatementLine, place.node) if _spec(file, line)]
    if len(found) != 1:
        return
    line, spec = found[0], _spec(file, found[0])
    assert spec is not None
    mesh, axes = argument(spec, 0, "mesh"), argument(spec, 1, "partition_spec")
    if mesh is None or axes is None or len(spec.args) != 2:
        return
    edits.handled.add(spec.func)
    parts, given = {"_0": mesh, "_1": axes}, "*_1"
    if isinstance(axes, cst.Tuple):
        parts = {"_0": mesh, **{f"_{n + 1}": one.value for n, one in enumerate(axes.elements)}}
        given = ", ".join(list(parts)[1:])
    text = f'{{"mesh": _0, "rules": "replicated", "inputs": PartitionSpec({given})}}'

    def with_sharding(updated: cst.SimpleStatementLine) -> cst.FlattenSentinel[cst.BaseStatement]:
        value = parsed(text, **parts)
        target = cst.AssignTarget(cst.Attribute(cst.Name("self"), cst.Name("sharding")))
        assigned = cst.SimpleStatementLine([cst.Assign([target], value)])
        return cst.FlattenSentinel([updated, assigned])

    def with_method(updated: cst.ClassDef) -> cst.ClassDef:
        (method,) = parsed_statements(_SHARD, file.module.config_for_parsing)
        made = method.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
        body = updated.body.with_changes(body=[*updated.body.body, made])
        return updated.with_changes(body=body)

    edits.replace(line, with_sharding)
    edits.replace(place.node, with_method)
    edits.imports |= {("jax.sharding", "PartitionSpec"), ("tpuport", None)}
    note = f"`{file.code(spec)}`: batches are split by tpuport.shard, which {place.name} calls"
    edits.done.append(Note(file.line(spec), CALL, note))


def _spec(file: SourceFile, line: cst.SimpleStatementLine) -> cst.Call | None:
    """Return the `ShardingSpec` of a loader that a statement assigns to an attribute."""
    small = statement_of(line)
    if not isinstance(small, cst.Assign) or own_attribute(small.targets[0].target) is None:
        return None
    call = small.value
    if (
        not m.matches(call, m.Call())
        or file.torch_xla_name(cst.ensure_type(call, cst.Call).func) != _LOADER
    ):
        return None
    spec = argument(cst.ensure_type(call, cst.Call), 99, "input_sharding")
    if isinstance(spec, cst.Call) and file.torch_xla_name(spec.func) == _SPEC:
        return spec
    return None
