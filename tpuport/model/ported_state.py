"""The state that a ported model holds between calls: params, buffers and Python attributes."""

import dataclasses
import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, Self

import jax
import torch

from tpuport.foundation.errors import PortError, UsageError
from tpuport.foundation.interop import backend, shared_memory
from tpuport.foundation.patching.shim import find_shims
from tpuport.foundation.pytree.clone import Cloner, clone_module, parameter_like
from tpuport.model import weights
from tpuport.model.attribute_place import attribute_place
from tpuport.model.module_edits import Copies, ModuleEdits
from tpuport.model.new_parameters import refuse_new_parameters
from tpuport.model.options import ConvertOptions
from tpuport.model.originals import Originals
from tpuport.model.program_cache import CachedProgram
from tpuport.model.shared_results import Copy, StateMemory, leave
from tpuport.model.weights import LoadResult
from tpuport.rules._discovery import live_rules
from tpuport.tracing import patches
from tpuport.tracing.core.context import no_policy
from tpuport.tracing.core.placement import NOWHERE, Placement
from tpuport.tracing.core.storage import differentiable
from tpuport.tracing.core.sym_numbers import exact_value
from tpuport.tracing.guards.module_changes import frame_of, put
from tpuport.tracing.patches.gradient_hooks import hooked_state
from tpuport.tracing.scan_layers import stacked_params
from tpuport.tracing.session.fallback import Fallback
from tpuport.tracing.session.tracer import Tracer
from tpuport.tracing.state.module_state import state_tree
from tpuport.tracing.state.tensor_attributes import refuse_wrapper
from tpuport.weights.checkpoint import Checkpoint
from tpuport.weights.load import Place, Progress

_SAME_STATE_LIMIT = 4
_MOST_STRUCTURES = 16


class PortedState:
    """The state half of a ported model.

    It holds the weights and buffers and the module that they belong to, and applies what a call
    changes in both.
    """

    def __init__(
        self, target: torch.nn.Module | Callable[..., Any], options: ConvertOptions
    ) -> None:
        is_module = isinstance(target, torch.nn.Module)
        self._source = target
        self._options = options
        self.params: dict[str, jax.Array] = {}
        self.buffers: dict[str, jax.Array] = {}
        # The values that the module has.
        # What was made of each tensor of the user's module, and the tensor's version then.
        self._loaded: dict[str, tuple[weakref.ref[jax.Array], int | None]] = {}
        self._originals = Originals("", {}, ())
        master = None
        if is_module:
            master, _ = clone_module(target, lambda t: t)
            self._load_state(master)
        self._tracer = Tracer(
            None if is_module else target,
            master,
            functions=dict(options.functions),
            patches=find_shims(patches),
            rules=live_rules(),
            hooked=hooked_state,
            blocks=options.blocks,
            passes=options.passes,
            fallback=Fallback() if options.fallback == "host" else None,
        )
        self._state_version = 0
        # Names of state whose tensors in the traced copy are no one else's.
        self._parted: set[str] = set()
        self._versions = itertools.count(1)
        # The structures that the module has had, with the version of each.
        self._structures_seen: list[tuple[Any, int]] = []
        self._state_changes: dict[str, int] = {}
        self._same_changes: dict[Any, int] = {}
        self._outside_changes = 0
        # The memory of state that results of calls share, by name.
        self._memories: MutableMapping[str, StateMemory] = weakref.WeakValueDictionary()
        # Results that are copies of a part of it, by name.
        self._copies: dict[str, weakref.WeakSet[Copy]] = {}
        self._edits: ModuleEdits | None = None
        # The key of the newest call, for what it leaves behind if it raises.
        self._last_key: jax.Array | None = None
        # The mode that the user's module had, until the port is given one of its own.
        self._mode = target.training if is_module else None

    def __copy__(self) -> Self:
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __reduce__(self) -> Any:
        """Refuse `copy.deepcopy` and pickle.

        Raises:
            UsageError: always.
        """
        msg = (
            "a ported model holds compiled programs: it can be neither pickled nor deep-copied."
            " What to do: copy or pickle the module, ported.params and ported.buffers, and convert"
            " the module again"
        )
        raise UsageError(msg)

    def _load_state(self, master: torch.nn.Module) -> None:
        tree = state_tree(master)
        self._originals = Originals(type(master).__name__, tree.leaves, tree.registered)
        for name, leaf in tree.leaves.items():
            # A plain attribute is a host constant until a call changes it. One that requires grad
            # was computed from parameters, as by weight_norm, and each call computes it anew.
            if name not in tree.registered and not leaf.requires_grad:
                continue
            trainable = isinstance(leaf, torch.nn.Parameter) and leaf.requires_grad
            target = self.params if trainable else self.buffers
            if leaf.device.type == "meta":
                stand_in: Any = jax.ShapeDtypeStruct(
                    tuple(leaf.shape), backend.jax_dtype(leaf.dtype)
                )
                target[name] = stand_in
            else:
                try:
                    target[name] = shared_memory.to_jax(leaf)
                except RuntimeError as error:
                    refuse_wrapper(name, leaf, error)
                    raise
                version = None if leaf.is_inference() else leaf._version
                self._loaded[name] = weakref.ref(target[name]), version

    @property
    def module(self) -> torch.nn.Module:
        """Return the ported copy of the module.

        It has the structure, the Python state and the weights and buffers of now; those of later
        calls are in `params` and `buffers`, and here when it is asked for again. What is changed in
        it (attributes, submodules, hooks, modes, weights) counts at the next call, which from now
        on takes longer by looking for such changes.

        Raises:
            UsageError: A function was ported, not a module.
        """
        if self._edits is None:
            shown = self._unwritten()
            self._replace_module(clone_module(self._module, Copies())[0])
            self._originals.part_all()
            self._watch(shown)
        else:
            self._edits.take(self)
            self._watch(self._edits.values)
        return self._module

    def _unwritten(self) -> dict[str, jax.Array]:
        """Return the arrays whose values the tensors of the module still have.

        They are those of the module that was converted, to which its owner may have written.
        """
        leaves = state_tree(self._module).leaves
        found = {}
        for name, (reference, version) in self._loaded.items():
            array, leaf = reference(), leaves.get(name)
            if array is not None and isinstance(leaf, torch.Tensor):
                # One that a training step was given to reuse has no values to show.
                if array.is_deleted() or shared_memory.is_unwritten(leaf, array, version):
                    found[name] = array
        return found

    def _watch(self, shown: Mapping[str, Any]) -> None:
        """Look for edits of the module from here on, which has the values `shown`."""
        self._edits = ModuleEdits(self, shown)

    @property
    def _module(self) -> torch.nn.Module:
        """Return the ported copy of the module, to look at."""
        if self._tracer.master is None:
            msg = "this is a ported function; it has no module"
            raise UsageError(msg)
        return self._tracer.master

    @property
    def frozen(self) -> dict[str, jax.Array]:
        """Return the part of `buffers` that are parameters with `requires_grad=False`, by fqn."""
        owners = dict(torch.nn.Module.named_parameters(self._module))
        first = {name: stacked_params.members_of(name) or [name] for name in self.buffers}
        return {name: value for name, value in self.buffers.items() if first[name][0] in owners}

    @property
    def _placement(self) -> Placement:
        """Return where `tpuport.shard` put the model."""
        return self._tracer.placement

    @property
    def _is_placed(self) -> bool:
        """Return whether `tpuport.shard` put the model anywhere."""
        return self._tracer.placement is not NOWHERE

    @property
    def _rolls(self) -> bool:
        """Return whether its repeated blocks may become loops."""
        return self._tracer.rolls

    @property
    def _recomputes(self) -> bool:
        """Return whether `tpuport.remat` chose what the backward pass computes again."""
        return self._tracer.remat is not no_policy

    @property
    def sharding(self) -> Any:
        """Return the `ShardingPlan` by which `tpuport.shard` spread the model, or None."""
        return getattr(self._placement, "plan", None)

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """Return the mesh that `tpuport.shard` placed the model on, or None."""
        return self._placement.mesh

    @property
    def training(self) -> bool:
        """Return whether the ported copy is in training mode."""
        return self._module.training

    def train(self, mode: bool = True) -> Self:
        """Set training mode, as `nn.Module.train` does (the next call may retrace).

        A `train` of the module's own, such as one that merges adapters into weights, runs on the
        values of now, and on no memory of the module that was converted.
        """
        self._mode = None
        self._take_edits()
        self._note_structure()
        if any(type(m).train is not torch.nn.Module.train for m in self._module.modules()):
            watched = self._edits is not None
            self.module.train(mode)
            self._take_edits()
            if not watched:
                self._edits = None  # nobody else has that module
        else:
            self._module.train(mode)
        self._find_version()
        if self._edits is not None:
            self._watch(self._edits.values)
        return self

    def eval(self) -> Self:
        """Set evaluation mode, as `nn.Module.eval` does."""
        return self.train(False)

    def _path_of(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the code path of a call; the first call of each is compared with eager PyTorch."""
        del args, kwargs
        return method

    def _differentiates(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether torch's autograd goes through a call."""
        del args, kwargs
        return False

    def _new_version(self) -> None:
        """Start a new state version, which invalidates every cached program."""
        self._state_version = next(self._versions)

    def _structure(self) -> Any:
        """Return all about the module and its state that programs are compiled for."""
        tree = state_tree(self._module, self._tracer.numbers, graphs=True)
        names = frozenset((*self.params, *self.buffers)), frozenset(self._tracer.numbers)
        return frame_of(tree, self._module), tree.aliases, names

    def _note_structure(self) -> None:
        """Note what structure the present version is of, before it changes."""
        if all(version != self._state_version for _, version in self._structures_seen):
            seen = [*self._structures_seen, (self._structure(), self._state_version)]
            self._structures_seen = seen[-_MOST_STRUCTURES:]

    def _find_version(self) -> None:
        """Start a new state version, or take that of a structure that the module has again.

        So a model that goes from training to evaluation and back has two programs.
        """
        now = self._structure()
        known = (version for one, version in self._structures_seen if one == now)
        self._state_version = next(itertools.chain(known, self._versions))

    def _replace_module(self, module: torch.nn.Module | None) -> None:
        """Take another module as the one that is traced from now on."""
        self._parted = set()
        self._tracer = dataclasses.replace(self._tracer, master=module)

    def _name_of(self, function: Callable[..., Any], prefix: str) -> str:
        """Return the name by which a function is called as a method, a new one if it has none."""
        functions = self._tracer.functions
        known = next((name for name, one in functions.items() if one is function), None)
        name = known or f"{prefix}_{len(functions)}"
        functions[name] = function
        return name

    def _values(self) -> dict[str, Any]:
        """Return all of `params` and `buffers`; blocks may be stacked."""
        return {**self.buffers, **self.params}

    def by_fqn(self) -> dict[str, Any]:
        """Return all of `params` and `buffers`, each by its own fqn even where they are stacked."""
        return stacked_params.unstack(self._values())

    def to_torch(self) -> torch.nn.Module:
        """Return a plain PyTorch module with the current weights and buffers.

        It is of the user's own class (`save_pretrained` works).

        Raises:
            UsageError: A function was ported, or the model was on the meta device and has no
                weights.
        """
        return self._as_module(self._module, self.by_fqn(), self._tracer.casting.held_dtype)

    def _eager(self, module: torch.nn.Module, values: dict[str, Any]) -> torch.nn.Module:
        """Return a module with these values, in the dtypes that the program computes in."""
        return self._as_module(module, values, lambda name, dtype: dtype)

    def _as_module(
        self,
        module: torch.nn.Module,
        values: dict[str, Any],
        dtype_of: Callable[[str, torch.dtype], torch.dtype],
    ) -> torch.nn.Module:
        tree = state_tree(module)
        names = {id(leaf): name for name, leaf in tree.leaves.items()}

        def back(tensor: torch.Tensor) -> torch.Tensor:
            name = names.get(id(tensor), "")
            value = values.get(name)
            if value is None:
                return tensor
            if isinstance(value, jax.ShapeDtypeStruct):
                msg = "to_torch() needs weights; this model was converted from the meta device"
                raise UsageError(msg)
            made = shared_memory.to_torch(value, dtype_of(name, tensor.dtype))
            made = shared_memory.unnarrowed(made, value, tensor)
            if isinstance(tensor, torch.nn.Parameter):
                return parameter_like(made, tensor)
            made = made.requires_grad_(tensor.requires_grad and differentiable(made.dtype))
            made = made if tensor.is_leaf else shared_memory.computed(made)
            vars(made).update(vars(tensor))
            return made

        made = clone_module(module, back)[0]
        for name in self._tracer.numbers & values.keys():
            # A Python number that became state of the program: `master` still has its old value.
            fqn, attribute = tree.owners[name]
            owner = made.get_submodule(fqn)
            owner.__dict__[attribute] = type(owner.__dict__[attribute])(values[name])
        return made

    def _checked_values(self, params: dict[str, Any], buffers: dict[str, Any]) -> dict[str, Any]:
        values = {**buffers, **params}
        names = [n for name in self._values() for n in stacked_params.members_of(name) or [name]]
        missing = [name for name in names if name not in values]
        if missing:
            msg = (
                "apply() got no value for"
                f" {', '.join(missing[:5])}{' and more' if len(missing) > 5 else ''}; pass"
                " params=ported.params and buffers=ported.buffers, or dicts with the same keys"
            )
            raise UsageError(msg)
        return {
            name: backend.to_jax(v) if isinstance(v, torch.Tensor) else v
            for name, v in values.items()
        }

    def _refuse_meta(self, state: dict[str, Any]) -> None:
        missing = [name for name, value in state.items() if isinstance(value, jax.ShapeDtypeStruct)]
        if missing:
            msg = (
                "the model was converted from the meta device:"
                f" {missing[0]!r} has a shape but no value, so it cannot be"
                " called; use ported.eval_shape(...) or compile it for a described TPU"
            )
            raise UsageError(msg)

    def load(
        self,
        source: str | Path | Mapping[str, Any],
        *,
        strict: bool = True,
        prefix: str = "",
        rename: Callable[[str], str | None] | None = None,
        place: Place | None = None,
        variant: str | None = None,
        subfolder: str = "",
        key: str | None = None,
        progress: Progress | None = None,
    ) -> LoadResult:
        """Load weights, straight from files into arrays: a model converted on the meta device
        never has a copy in PyTorch.

        Args:
            source: A file or directory as for `tpuport.load_checkpoint`, the result of
                `tpuport.open_checkpoint`, or a mapping of tensors or arrays.
            strict: Refuse names that are missing or unknown to the model.
            prefix: The prefix of the model's names in the checkpoint.
            rename: Returns the model's name for a name of the checkpoint, or None to skip it.
            place: A sharding or device for each name, as for `tpuport.load_checkpoint`.
            variant: The variant of a directory's weights, such as "fp16".
            subfolder: The subfolder of a directory, such as "transformer".
            key: The key of the weights in a torch file.
            progress: Called with the bytes done and the total bytes.

        Returns:
            `missing_keys` and `unexpected_keys`. Values get the model's dtypes, as in
            `load_state_dict`. If it raises, nothing has changed.

        Raises:
            CheckpointError: The checkpoint is damaged or does not fit, or the model has buffers
                that no checkpoint holds and no values for them.
            UsageError: A function was ported, its module has loading hooks of its own, or its
                blocks are stacked already.
        """
        stacked_params.refuse_stacks(self._values(), "loading weights")
        where = {"variant": variant, "subfolder": subfolder, "key": key}
        options = {"prefix": prefix, "rename": rename, "progress": progress}
        place = place or self._placement.place
        return weights.load_model(self, source, strict=strict, place=place, **options, **where)

    def _checkpoint_values(
        self, like: Checkpoint | None
    ) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
        """Return the weights by the names that `state_dict` has, and their dtypes there."""
        return weights.checkpoint_values(self, like)

    def _checkpoint_metadata(self) -> dict[str, str]:
        """Return what a safetensors file says about the weights besides."""
        return {}

    # -- after a call ------------------------------------------------------------------------------

    def _advance(self, compiled: CachedProgram, new_state: dict[str, jax.Array]) -> None:
        if self._memories or self._copies:
            leave(self, compiled.outcome.rebound)
        for name, value in new_state.items():
            target = self.params if name in self.params else self.buffers
            if name not in target:
                self._new_version()
                self._originals.part(name)
            target[name] = value
        self._originals.warn()
        changes = compiled.outcome.python_changes
        if changes:
            self._apply_python_state(compiled, changes)
        self._part_from_old(compiled.outcome.bound & new_state.keys())

    def _part_from_old(self, names: frozenset[str]) -> None:
        """Part the traced copy from tensors that are no state any more.

        Code may reach such a tensor still, as a global or in a closure, and a trace would take it
        for the state that it was.
        """
        new = names - self._parted
        if not new:
            return
        tree = state_tree(self._module)
        found = {name: tree.leaves.get(name) for name in sorted(new)}
        # A meta tensor is no one else's.
        tensors = {n: t for n, t in found.items() if isinstance(t, torch.Tensor)}
        old = {id(t): name for name, t in tensors.items() if t.device.type != "meta"}
        cloner = Cloner(lambda tensor: _like(tensor) if id(tensor) in old else tensor)
        cloner.memo.update({id(module): module for module in self._module.modules()})
        owners = [tree.owners[full] for full in tree.attributes_of(old.values())]
        held = [(self._module.get_submodule(fqn), attribute) for fqn, attribute in owners]
        put([(owner, owner, attribute) for owner, attribute in held], cloner)
        if self._edits is not None and self._edits.module is self._module:
            self._watch(self._edits.values)
        self._parted |= names

    def _refuse_changes(self, compiled: CachedProgram) -> None:
        """Refuse changes of Python state that come with each call, before anything is written.

        What runs the call in eager PyTorch instead has to find its arguments and state untouched.
        """
        refuse_new_parameters(compiled.outcome)
        changes = compiled.outcome.python_changes
        # A program that was there already costs nothing more.
        if changes is None or compiled.was_applied:
            return
        for name in changes.causes:
            self._state_changes[name] = self._state_changes.get(name, 0) + 1
            # A table that grows with the arguments changes once for each shape, which is harmless:
            # only repeated changes at the same shapes count.
            repeated = (name, compiled.signature.method, compiled.signature.key[:2])
            self._same_changes[repeated] = self._same_changes.get(repeated, 0) + 1
            if self._same_changes[repeated] >= _SAME_STATE_LIMIT:
                owner = changes.owners.get(name)
                if owner is None:
                    raise _hooks_change_each_time(name)
                raise _changes_each_time(name, self._module.get_submodule(owner[0]), owner[1])

    def _apply_python_state(self, compiled: CachedProgram, changes: Any) -> None:
        self._note_structure()
        master = self._module
        causes = () if compiled.was_applied else changes.causes
        compiled.was_applied = True
        for name in causes:
            repeated = (name, compiled.signature.method, compiled.signature.key[:2])
            if name in changes.numbers:
                self._tracer.numbers.add(name)
                continue
            again = self._state_changes[name] >= 2 and self._same_changes[repeated] >= 2
            if again and isinstance(changes.after.get(name), (bool, int, float)):
                self._promote_number(name, changes.after[name])
        self._replace_module(changes.apply(master))
        if changes.replacement is not None:
            self._adopt(changes.replacement, state_tree(changes.replacement).leaves)
        for name, value in changes.host_state.items():
            target = self.params if name in self.params else self.buffers
            target[name] = backend.to_jax(value)
        for name in changes.gone:
            self.buffers.pop(name, None)
        self._find_version()
        if self._edits is not None and self._edits.module is self._module:
            self._watch(self._edits.values)

    def _take_edits(self) -> None:
        """Take over what a script changed in `module`.

        Raises:
            UsageError: it changed a weight that has another value by now, or the mode of the module
                that was converted.
        """
        if self._edits is not None:
            self._edits.take(self)
            self._originals.warn()
        mode = self._mode
        if mode is not None and mode != self._source.training:  # type: ignore[union-attr]
            now, was = ("eval", "train") if mode else ("train", "eval")
            raise UsageError(
                f"{now}() was called on the {type(self._source).__name__} after it was converted."
                f" The port is of a copy: call ported.{now}() too, or ported.{was}() to keep its"
                " own mode"
            )

    def _adopt(
        self, module: torch.nn.Module, leaves: Mapping[str, Any], fresh: Iterable[str] = ()
    ) -> None:
        """Sort the state into params and buffers again after submodules were exchanged.

        Args:
            module: The module.
            leaves: Its state by name.
            fresh: The names whose values are taken from there.
        """
        names, values = list(leaves), self.by_fqn()
        for name in fresh:
            leaf = leaves[name]
            is_tensor = isinstance(leaf, torch.Tensor)
            values[name] = backend.to_jax(leaf) if is_tensor else exact_value(leaf)
        trainable = {n for n, p in torch.nn.Module.named_parameters(module) if p.requires_grad}
        kept = {name: values[name] for name in names if name in values}
        self.params = {n: v for n, v in kept.items() if n in trainable}
        self.buffers = {n: v for n, v in kept.items() if n not in trainable}

    def _count_outside(self, what: str | None) -> None:
        """Count consecutive calls that found something outside the module changed, in a new way.

        Raises:
            PortError: The limit of such calls is reached.
        """
        self._outside_changes = self._outside_changes + 1 if what else 0
        if self._outside_changes >= _SAME_STATE_LIMIT:
            raise PortError(
                f"{what}, and such changes came before each of the last calls, so each call is"
                " compiled again",
                code="TPU406",
                remedy=("convert the module that owns it, or pass it as an argument of the call"),
            )

    def _promote_number(self, name: str, value: Any) -> None:
        """Turn a Python number that changes at each call into state of the program."""
        self._tracer.numbers.add(name)
        self.buffers[name] = exact_value(value)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Return another tensor that a trace cannot tell from this one."""
    if isinstance(tensor, torch.nn.Parameter):
        return tensor
    with torch.enable_grad():
        made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        made = made if tensor.is_leaf else made.view_as(made)
    vars(made).update(vars(tensor))
    return made


def _hooks_change_each_time(name: str) -> PortError:
    return PortError(
        f"{name} change on every call, so every call is compiled again",
        code="TPU405",
        remedy="take hooks off at the end of the call that puts them on (handle.remove())",
    )


def _changes_each_time(name: str, owner: torch.nn.Module, attribute: str) -> PortError:
    place = attribute_place(owner, attribute)
    return PortError(
        f"the Python attribute {name!r} of the module changes on every call, so every call is"
        " compiled again",
        code="TPU405",
        file=None if place is None else place.file,
        line=None if place is None else place.line,
        source_line=None if place is None else place.source,
        remedy="register it as a buffer (self.register_buffer(name, torch.zeros(()))) and update"
        " that",
    )
