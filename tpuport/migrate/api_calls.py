"""Calls of torch_xla's API, each replaced by what stands for it in one process of all devices."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import libcst as cst
import libcst.matchers as m

from tpuport.migrate.helpers import RATE_TRACKER
from tpuport.migrate.source_file import (
    Edits,
    Note,
    SourceFile,
    argument,
    keywords,
    parsed,
    statement_of,
)
from tpuport.rules._torch_xla_facts import NEEDLESS

CALL, NEEDLESS_CALL = "TPU701", "TPU702"

_CORE, _RUNTIME = "torch_xla.core.xla_model", "torch_xla.runtime"
_HOST = 'torch.device("cpu")'
_REPORTS = {"torch_xla.debug.metrics.metrics_report", "torch_xla._XLAC._xla_metrics_report"}
_LOADER = "torch_xla.distributed.parallel_loader.MpDeviceLoader"
_PARALLEL = "torch_xla.distributed.parallel_loader.ParallelLoader"
_COMPILE = "torch_xla.compile"
_WAITS = {f"{_CORE}.wait_device_ops"}


@dataclass(frozen=True)
class _Made:
    """What stands in place of a call.

    Attributes:
        text: An expression, in whose text the names of `parts` stand for nodes.
        parts: Arguments of the call.
        imports: What the expression needs.
        note: What to say to the reader besides.
    """

    text: str
    parts: Mapping[str, cst.BaseExpression]
    imports: tuple[tuple[str, str | None], ...] = ()
    note: str = ""


_TORCH, _JAX, _TPUPORT = ((name, None) for name in ("torch", "jax", "tpuport"))


def _constant(text: str, *imports: tuple[str, str | None]) -> Callable[[cst.Call], _Made | None]:
    return lambda call: _Made(text, {}, imports)


def _renamed(
    text: str, positional: int, *imports: tuple[str, str | None]
) -> Callable[[cst.Call], _Made | None]:
    """Return a call of another function, if it has just so many plain arguments."""

    def make(call: cst.Call) -> _Made | None:
        if keywords(call) or len(call.args) != positional:
            return None
        parts = {f"_{number}": arg.value for number, arg in enumerate(call.args)}
        return _Made(f"{text}({', '.join(parts)})", parts, imports)

    return make


def _printed(call: cst.Call) -> _Made | None:
    if keywords(call):
        return None
    parts = {f"_{number}": arg.value for number, arg in enumerate(call.args)}
    return _Made(f"print({', '.join(parts)})", parts)


def _stepped(call: cst.Call) -> _Made | None:
    optimizer = argument(call, 0, "optimizer")
    if optimizer is None or keywords(call) - {"optimizer", "barrier"}:
        return None
    note = "this step of torch's optimizer runs in eager PyTorch on the host"
    return _Made("_0.step()", {"_0": optimizer}, note=note)


def _called(call: cst.Call) -> _Made | None:
    """Return a call of the function that every process was to run."""
    function, args = argument(call, 0, "fn"), argument(call, 1, "args")
    if function is None or keywords(call) - _LAUNCH:
        return None
    note = (
        "one process drives all devices, so the batches of N processes are one batch N times as"
        " large: scale batch_size, or the learning rate"
    )
    if args is None or m.matches(args, m.Tuple(elements=[])):
        return _Made("_0(0)", {"_0": function}, note=note)
    if isinstance(args, cst.Tuple) and _is_plain(args):
        given = {f"_{number + 1}": one.value for number, one in enumerate(args.elements)}
        return _Made(f"_0(0, {', '.join(given)})", {"_0": function, **given}, note=note)
    return _Made("_0(0, *_1)", {"_0": function, "_1": args}, note=note)


def _is_plain(args: cst.Tuple) -> bool:
    return all(isinstance(element, cst.Element) for element in args.elements)


_LAUNCH = {"fn", "args", "start_method", "debug_single_process", "nprocs", "join", "daemon"}


def _at_once(call: cst.Call) -> _Made | None:
    """Return a call of a closure, which was to run at the end of the step."""
    function, args = argument(call, 0, "closure"), argument(call, 1, "args")
    if function is None or keywords(call) - {"closure", "args", "run_async"}:
        return None
    if args is None:
        return _Made("_0()", {"_0": function})
    if not isinstance(args, cst.Tuple):
        return _Made("_0(*_1)", {"_0": function, "_1": args})
    if not _is_plain(args):
        return None
    parts = {f"_{number + 1}": element.value for number, element in enumerate(args.elements)}
    return _Made(f"_0({', '.join(parts)})", {"_0": function, **parts})


def _loader(call: cst.Call) -> _Made | None:
    loader = argument(call, 0, "loader")
    if loader is None or "**" in keywords(call):
        return None
    note = "reads in the script's thread; tpuport.training.Batches(loader) reads ahead"
    return _Made("_0", {"_0": loader}, note=note)


def _samples(call: cst.Call) -> _Made | None:
    data, count = argument(call, 0, "data"), argument(call, 1, "sample_count")
    if data is None or count is None:
        return None
    if not isinstance(count, cst.Name | cst.Integer) and not count.lpar:
        count = count.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    return _Made("[_0] * _1", {"_0": data, "_1": count})


def _mesh(call: cst.Call) -> _Made | None:
    ids, shape = argument(call, 0, "device_ids"), argument(call, 1, "mesh_shape")
    names = argument(call, 2, "axis_names")
    if ids is None or shape is None or names is None:
        return None
    text = "Mesh(np.array(jax.devices())[np.asarray(_0)].reshape(_1), _2)"
    imports = (_JAX, ("jax.sharding", "Mesh"), ("numpy", "np"))
    return _Made(text, {"_0": ids, "_1": shape, "_2": names}, imports)


def _cache(call: cst.Call) -> _Made | None:
    path, reads = argument(call, 0, "path"), argument(call, 1, "readonly")
    if path is None or not (reads is None or m.matches(reads, m.Name("False"))):
        return None
    return _Made("tpuport.compile_cache(_0)", {"_0": path}, (_TPUPORT,))


def _uncompiled(call: cst.Call) -> _Made | None:
    function = argument(call, 0, "f")
    if function is None:
        return None
    note = "is no longer compiled unless its step was moved; tpuport.convert compiles a model"
    return _Made("_0", {"_0": function}, note=note)


_RANK, _RANKS = _constant("jax.process_index()", _JAX), _constant("jax.process_count()", _JAX)
_ALL, _OURS = _constant("jax.device_count()", _JAX), _constant("jax.local_device_count()", _JAX)
_BACKEND = _constant("jax.default_backend().upper()", _JAX)

MADE: dict[str, Callable[[cst.Call], _Made | None]] = {
    "torch_xla.device": _constant(_HOST, _TORCH),
    "torch_xla.device_count": _ALL,
    "torch_xla.manual_seed": _renamed("torch.manual_seed", 1, _TORCH),
    "torch_xla.launch": _called,
    _COMPILE: _uncompiled,
    f"{_CORE}.xla_device": _constant(_HOST, _TORCH),
    f"{_CORE}.xla_device_hw": _BACKEND,
    f"{_CORE}.optimizer_step": _stepped,
    f"{_CORE}.is_master_ordinal": _constant("(jax.process_index() == 0)", _JAX),
    f"{_CORE}.get_ordinal": _RANK,
    f"{_CORE}.get_local_ordinal": _constant("0"),
    f"{_CORE}.xrt_world_size": _RANKS,
    f"{_CORE}.master_print": _printed,
    f"{_CORE}.save": _renamed("torch.save", 2, _TORCH),
    f"{_CORE}.add_step_closure": _at_once,
    f"{_CORE}.set_rng_state": _renamed("torch.manual_seed", 1, _TORCH),
    f"{_CORE}.RateTracker": _constant("RateTracker()"),
    f"{_RUNTIME}.world_size": _RANKS,
    f"{_RUNTIME}.global_ordinal": _RANK,
    f"{_RUNTIME}.process_index": _RANK,
    f"{_RUNTIME}.process_count": _RANKS,
    f"{_RUNTIME}.local_ordinal": _constant("0"),
    f"{_RUNTIME}.global_runtime_device_count": _ALL,
    f"{_RUNTIME}.global_device_count": _ALL,
    f"{_RUNTIME}.addressable_runtime_device_count": _OURS,
    f"{_RUNTIME}.addressable_device_count": _OURS,
    f"{_RUNTIME}.local_device_count": _OURS,
    f"{_RUNTIME}.device_type": _BACKEND,
    f"{_RUNTIME}.initialize_cache": _cache,
    _LOADER: _loader,
    "torch_xla.distributed.xla_multiprocessing.spawn": _called,
    "torch_xla.distributed.spmd.Mesh": _mesh,
    "torch_xla.utils.utils.SampleGenerator": _samples,
}
# Calls that may only stand alone: what they return is not what stands for them returns.
_STATEMENTS = {
    "torch_xla.launch",
    "torch_xla.distributed.xla_multiprocessing.spawn",
    f"{_CORE}.add_step_closure",
    f"{_CORE}.optimizer_step",
    f"{_CORE}.set_rng_state",
    "torch_xla.manual_seed",
    f"{_RUNTIME}.initialize_cache",
}


def plan_calls(file: SourceFile, edits: Edits) -> None:
    """Plan an edit for each call that has a counterpart and that nothing else has taken."""
    for call in file.all(cst.Call):
        if call in edits.handled or call.func in edits.handled:
            continue
        name = file.torch_xla_name(call.func)
        if name is not None:
            _plan_call(file, edits, call, name)
        elif m.matches(call.func, m.Attribute(attr=m.Name("per_device_loader"))):
            _plan_parallel_loader(file, edits, call)
    for block in file.all(cst.With):
        _plan_step_scope(file, edits, block)
    for call in file.all(cst.Call):
        _plan_print(file, edits, call)


def _plan_call(file: SourceFile, edits: Edits, call: cst.Call, name: str) -> None:
    statement = _alone(file, call)
    if (name in NEEDLESS or name in _WAITS) and statement is not None:
        why = NEEDLESS.get(name, "results that are read are waited for")
        remove(file, edits, statement, f"`{file.code(call)}` is gone: {why}")
        return
    made = MADE[name](call) if name in MADE else None
    if made is None or (name in _STATEMENTS and statement is None):
        return
    if made.text == "RateTracker()":
        if call.args:
            return
        edits.helpers["RateTracker"] = RATE_TRACKER
        made = _Made(made.text, {}, (("time", None),))
    text = f"`{file.code(call)}` became `{shown(file, made.text, made.parts)}`"
    edits.imports.update(made.imports)
    edits.handled.add(call.func)
    edits.done.append(Note(file.line(call), CALL, text))
    note = made.note
    spec = argument(call, 99, "input_sharding")
    if spec is not None and getattr(spec, "func", None) not in edits.handled:
        note += ". Its input_sharding is gone: give tpuport.shard(..., inputs=)"
    if note:
        edits.left.append(Note(file.line(call), CALL, f"`{file.code(call)}`: {note}"))
    edits.replace(call, lambda updated: _remade(updated, name))


def _remade(updated: cst.Call, name: str) -> cst.BaseExpression:
    """Return what stands for a call whose arguments are edited already."""
    made = MADE[name](updated)
    assert made is not None
    result = parsed(made.text, **made.parts)
    if isinstance(result, cst.BinaryOperation) and not result.lpar:
        return result.with_changes(lpar=updated.lpar, rpar=updated.rpar)
    return result


def shown(file: SourceFile, text: str, parts: Mapping[str, cst.BaseExpression]) -> str:
    """Return an expression as it will stand there, on one line."""
    return file.code(parsed(text, **parts))


def _plan_parallel_loader(file: SourceFile, edits: Edits, call: cst.Call) -> None:
    """Plan `ParallelLoader(loader, devices).per_device_loader(device)`."""
    assert isinstance(call.func, cst.Attribute)
    made = call.func.value
    if not isinstance(made, cst.Call) or file.torch_xla_name(made.func) != _PARALLEL:
        return
    if argument(made, 0, "cpu_loader") is None or "input_sharding" in keywords(made):
        return
    edits.handled |= {made, made.func}
    text = "reads in the script's thread; tpuport.training.Batches(loader) reads ahead"
    edits.done.append(Note(file.line(call), CALL, f"`{file.code(call)}` became the loader itself"))
    edits.left.append(Note(file.line(call), CALL, f"`{file.code(made)}`: {text}"))
    edits.replace(call, lambda updated: argument(updated.func.value, 0, "cpu_loader"))


def _plan_step_scope(file: SourceFile, edits: Edits, block: cst.With) -> None:
    """Plan `with torch_xla.step():`, whose body stays."""
    if len(block.items) != 1 or not isinstance(block.items[0].item, cst.Call):
        return
    call = block.items[0].item
    if file.torch_xla_name(call.func) != "torch_xla.step" or not isinstance(
        block.body, cst.IndentedBlock
    ):
        return
    edits.handled.add(call.func)
    why = NEEDLESS["torch_xla.step"]
    edits.done.append(Note(file.line(block), NEEDLESS_CALL, f"`with torch_xla.step()`: {why}"))
    edits.replace(block, lambda updated: cst.FlattenSentinel(updated.body.body))


def _plan_print(file: SourceFile, edits: Edits, call: cst.Call) -> None:
    """Plan a print of torch_xla's metrics, which goes."""
    statement = _alone(file, call)
    prints = m.matches(call.func, m.Name("print")) or (
        file.torch_xla_name(call.func) == f"{_CORE}.master_print"
    )
    if statement is None or not prints or len(call.args) != 1:
        return
    inner = call.args[0].value
    if not isinstance(inner, cst.Call) or file.torch_xla_name(inner.func) not in _REPORTS:
        return
    edits.left.append(
        Note(
            file.line(call),
            CALL,
            f"`{file.code(call)}` is gone: print `report` of the ported model, and `retraces` and"
            " `causes` of the training step, which count programs instead",
        )
    )
    remove(file, edits, statement, f"`{file.code(call)}` is gone with torch_xla's counters")


def _alone(file: SourceFile, call: cst.Call) -> cst.SimpleStatementLine | None:
    """Return the statement that is this call and nothing else."""
    expression = file.parent(call)
    line = None if expression is None else file.parent(expression)
    if isinstance(line, cst.SimpleStatementLine) and statement_of(line) is expression:
        return line if isinstance(expression, cst.Expr) else None
    return None


def remove(file: SourceFile, edits: Edits, statement: cst.SimpleStatementLine, text: str) -> None:
    """Plan to remove a statement, and say so."""
    edits.done.append(Note(file.line(statement), NEEDLESS_CALL, text))
    for node in [*file.all(cst.Name, statement), *file.all(cst.Attribute, statement)]:
        edits.handled.add(node)
    edits.replaced[statement] = lambda updated: cst.RemoveFromParent()
