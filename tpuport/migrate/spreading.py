"""Shardings of torch_xla's SPMD that become `tpuport.shard` of the model of a moved step."""

from collections.abc import Iterable, Mapping

import libcst as cst
import libcst.matchers as m

from tpuport.migrate.api_calls import CALL, remove
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
_FSDP = "torch_xla.experimental.spmd_fully_sharded_data_parallel.SpmdFullyShardedDataParallel"
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
    wrapped = [one for one in file.all(cst.SimpleStatementLine, place.node) if _wraps(file, one)]
    rules = "fsdp" if wrapped else "replicated"
    for statement in wrapped:
        _plan_unwrapped(place, edits, statement)
    parts, given = {"_0": mesh, "_1": axes}, "*_1"
    if isinstance(axes, cst.Tuple):
        parts = {"_0": mesh, **{f"_{n + 1}": one.value for n, one in enumerate(axes.elements)}}
        given = ", ".join(list(parts)[1:])
    text = f'{{"mesh": _0, "rules": "{rules}", "inputs": PartitionSpec({given})}}'

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


def _wraps(file: SourceFile, line: cst.SimpleStatementLine) -> bool:
    """Return whether a statement is `self.model = FSDPv2(self.model, ...)`."""
    small = statement_of(line)
    if not isinstance(small, cst.Assign) or not isinstance(small.value, cst.Call):
        return False
    inner = own_attribute(argument(small.value, 0, "module"))
    is_same = inner is not None and own_attribute(small.targets[0].target) == inner
    return is_same and file.torch_xla_name(small.value.func) == _FSDP


def _plan_unwrapped(place: ClassPlace, edits: Edits, line: cst.SimpleStatementLine) -> None:
    """Plan to remove a wrapper, and a policy that was made for it alone."""
    file, function = place.file, place.file.around(line, cst.FunctionDef)
    remove(file, edits, line, f"`{file.code(line)}` is gone: tpuport.shard spreads the weights")
    names = {one.value for one in file.all(cst.Name, line)}
    for statement in file.all(cst.SimpleStatementLine, function):
        small = statement_of(statement)
        if not isinstance(small, cst.Assign) or not isinstance(small.targets[0].target, cst.Name):
            continue
        name = small.targets[0].target.value
        uses = [one for one in file.all(cst.Name, function) if one.value == name]
        outside = [one for one in uses if not any(up is line for up in file.above(one))]
        is_policy = any(file.torch_xla_name(one) for one in file.all(cst.Name, small.value))
        if name in names and len(outside) == 1 and is_policy:
            remove(file, edits, statement, f"`{name}` is gone with what it was for")


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
