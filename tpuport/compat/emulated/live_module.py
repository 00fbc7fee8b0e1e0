"""A ported model over the user's own module, which share every change of state."""

import weakref
from typing import Any

import jax
import torch

from tpuport.compat.emulated import gradients, spread, trained_flags
from tpuport.compat.emulated.call_lengths import CallLengths, Fit
from tpuport.compat.emulated.leaf_keys import LeafKeys
from tpuport.compat.emulated.left_tensors import LeftTensors, owner_of, part_of
from tpuport.compat.emulated.rewritten import kept_buffers, kept_results
from tpuport.compat.emulated.script_numbers import ScriptNumbers
from tpuport.compat.emulated.settings import active
from tpuport.compat.emulated.structures import Structures
from tpuport.foundation import pytree
from tpuport.foundation.errors import ParityError, PortError, TpuportError
from tpuport.foundation.interop import backend
from tpuport.foundation.interop.device_mark import is_tagged, tag
from tpuport.foundation.interop.saved_tensors import without_saved_tensors_hooks
from tpuport.foundation.pytree.clone import Cloner, clone_module
from tpuport.generation import generate
from tpuport.model import after_error
from tpuport.model.convert import check_signature
from tpuport.model.options import ConvertOptions
from tpuport.model.originals import Originals
from tpuport.model.parity import gradients as parity
from tpuport.model.parity import verify
from tpuport.model.parity.saved_inputs import Saved, saved_inputs
from tpuport.model.parity.verify import Reference
from tpuport.model.ported_model import PortedModel
from tpuport.model.program_cache import BoundCall, CachedProgram, CallArguments, Signature
from tpuport.tracing.core import arguments
from tpuport.tracing.guards.attribute_reads import AttributeReads, recorded
from tpuport.tracing.guards.global_state import OWN
from tpuport.tracing.guards.linked_arguments import links_of
from tpuport.tracing.guards.module_changes import (
    differences,
    named,
    put,
    refuse_backward_hooks,
)
from tpuport.tracing.state.module_state import StateTree, state_tree
from tpuport.tracing.state.request import Alias


class LiveModel(PortedModel):
    """The programs of one module of the user's.

    A `PortedModel` keeps its own copy of the module. Here the module stays the user's: weights that
    an optimizer changed, attributes that a script set and layers that it exchanged reach the
    program at the next call. Buffers and attributes that a call changed reach the module.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        verified: bool | str,
        rtol: float | None,
        fallback: str | None = None,
    ) -> None:
        super().__init__(module, ConvertOptions(verify=False, fallback=fallback))
        # A program must not keep alive the module that it belongs to.
        self._reference, self._source = weakref.ref(module), weakref.proxy(module)
        self._mode, self._originals = None, Originals("", {}, ())
        self._tracer.takes_gradients = True
        self._tracer.hooked = None  # torch calls the hooks of this module's parameters itself
        self._wanted: gradients.Wanted | None = None
        self._saved_inputs: dict[Any, Saved] = {}
        self._compared: gradients.DifferentiatedCall | None = None
        self._script_numbers = ScriptNumbers()
        self._python_changes: list[Any] = []
        self._lengths, self._fit = CallLengths(type(module)), None
        self._left = LeftTensors()
        # Results that are buffers which the call writes to, or views of them.
        self._buffer_results: list[tuple[torch.Tensor, Alias]] = []
        self._structures = Structures(self._reference, self._tracer.numbers)
        self._tree = self._structures.tree()
        # The names of state that were seen, with a number each.
        self._names_seen: dict[Any, int] = {}
        self._named, self._named_at = 0, -1
        # A model begins on one device, whatever the script spreads.
        self._leaf_keys = LeafKeys()
        self._keys = self._leaf_keys.at_first(self._tree)
        if verified:
            self._verifier = verify.Verifier(self, self._source, rtol)
            self._verifier.always = verified == "always"
        if generate.is_transformers(module):
            self._composed["generate"] = generate.TextGeneration(self)

    @property
    def methods_compiled(self) -> set[str]:
        """Return the methods that have become programs."""
        return {signature.method for signature in self._cache}

    @property
    def _user(self) -> torch.nn.Module:
        module = self._reference()
        assert module is not None, "called by the module itself"
        return module

    def call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the user's module as a program.

        Raises:
            PortError: the code cannot be ported exactly, or its result differs from eager's.
        """
        check_signature(self._user, method, args, kwargs)
        refuse_backward_hooks(self._user)
        self._structures.links = self._tracer.links = links_of(self._user, (args, kwargs))
        # Without torch's function modes, reading the tensors takes half the time.
        with torch._C.DisableTorchFunction():
            self._follow_shardings(args, kwargs)
            self._take_in()
        before = self._values()
        self._python_changes.clear()
        self._left = LeftTensors()
        self._last_key = None
        with without_saved_tensors_hooks():
            try:
                out = self._call_at_length(method, args, kwargs)
            except Exception as error:
                if self._script_numbers.fixed_for(error, self._tracer.numbers, self.buffers):
                    self._structures.forget()
                    return self.call(method, args, kwargs)
                if after_error.is_of_the_code(error, (args, kwargs)):
                    after_error.repeat(self, self._user, method, args, kwargs)
                raise
        self._structures.note_outside()  # which the call may set at its first use
        self._give_back(before)
        out = self._left.share_buffers(out, self._buffer_results, self._tree)
        self._buffer_results.clear()
        return out

    def _call_at_length(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method by a program for many lengths, if its calls have been getting longer."""
        fit = self._fitting(method, args, kwargs)
        while fit is not None:
            self._fit = fit
            try:
                out = self._call(method, args, kwargs)
            except ParityError:
                raise
            except (TpuportError, RuntimeError, TypeError, ValueError, IndexError) as error:
                # Nothing was changed yet. The program for these sizes tells what is wrong.
                is_guess, fit = fit.is_guess, self._lengths.again(fit)
                if fit is None and not is_guess:
                    text = str(error).partition("\n")[0]
                    self.report.notes.append(f"{method}: a program for each length, as {text}")
            else:
                self._lengths.keep(fit)
                return out
            finally:
                self._fit = None
        return self._call(method, args, kwargs)

    def _fitting(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Fit | None:
        if self._is_composed(method) or spread.mesh() is not None or self._tracer.fallback:
            return None
        if self._differentiates(args, kwargs):
            return None
        leaves, spec, paths = arguments.flatten_call((args, kwargs))
        fit = self._lengths.fit(method, leaves, spec, paths)
        if fit is None or not fit.is_new or fit.lengths.sizes:
            return fit
        # A number may be one that no code looks at.
        _, given = super()._flattened(args, kwargs)
        self._wanted, state = None, self._values()
        signature = self._signature(method, given)
        known, _ = self._known_program(signature, state, given, is_call=True)
        return fit if known is None else None

    def _flattened(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], CallArguments]:
        leaves, given = super()._flattened(args, kwargs)
        return (leaves, given) if self._fit is None else self._fit.arguments(leaves, given)

    def keep_loops(self, method: str) -> None:
        """Refuse the method if a loop that makes tensors longer would be compiled by rounds."""
        self._tracer.whole.add(method)

    # -- state of the user's module ----------------------------------------------------------------

    def _follow_shardings(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put weights and arguments on the devices over which the script spreads them."""
        mesh = spread.mesh()
        if mesh is None:
            return
        placement = self._placement
        if not isinstance(placement, spread.OnDevices):
            placement = spread.OnDevices(mesh)
            self._reconfigure(placement=placement)
        placement.take(args, kwargs)

    def _take_in(self) -> None:
        """Take over what changed in the user's module since the last call."""
        structures = self._structures
        tree = structures.tree()
        outside = structures.changed(tree)
        if outside is not None:
            unread = structures.unread(self._tree, tree, outside, self._values())
            if structures.leave_out(unread, outside):
                tree = structures.tree()
            else:
                names = (name.removeprefix(OWN) for name in outside)
                self._state_changes.update(dict.fromkeys(names, 1))
                tree = self._take_structure(tree, unread)
        for name, leaf in tree.leaves.items():
            self._take_leaf(name, leaf, name in tree.registered)
        self._tree = tree
        self._tracer.held, self._tracer.unread = tree.leaves, structures.now.unread

    def _take_structure(self, tree: StateTree, unread: frozenset[str]) -> StateTree:
        """Take over a changed attribute, layer or hook, which needs another program.

        A number that changes a second time becomes an input of the program.
        """
        structures = self._structures
        again = self._script_numbers.again(self._tree, tree)
        for name in again:
            self._promote_number(name, tree.values[name])
            self._state_changes[name] = self._state_changes.get(name, 0) + 1
        if again:
            tree = structures.tree()
        if not again or structures.frame(tree) != structures.now.frame:
            self._state_changes.update(dict.fromkeys(named(differences(self._tree, tree)), 1))
        structures.find(self._state_changes, self._values(), unread)
        tree = structures.tree()
        self._replace_module(clone_module(self._user, lambda t: t)[0])
        self._adopt(self._user, tree.leaves)
        return tree

    def _take_leaf(self, name: str, leaf: Any, registered: bool) -> None:
        if not isinstance(leaf, torch.Tensor):
            if name in self._tracer.numbers:
                self.buffers[name] = jax.numpy.asarray(leaf)
            return
        if registered and not is_tagged(leaf):
            tag(leaf)
        key = self._leaf_keys.of(name, leaf, registered)
        # A plain attribute may require grad too: an output of another module, set by a script.
        holder, other = self.buffers, self.params
        if leaf.requires_grad or name in self._tracer.late:
            holder, other = other, holder
        known = name in self.params or name in self.buffers
        settled = known or not (registered or leaf.requires_grad)
        same = self._keys.get(name) == key
        if same and settled and name not in other:
            return
        first = name not in self._keys
        self._keys[name] = key
        if first and settled and not known:
            return  # a plain attribute is a host constant until something changes it
        if not known:
            self._new_version()
        held = other.pop(name, None)
        holder[name] = held if same and held is not None else spread.placed(leaf)

    # -- what a call changed -----------------------------------------------------------------------

    def _advance(self, compiled: Any, new_state: dict[str, jax.Array]) -> None:
        super()._advance(compiled, new_state)
        self._left.note(compiled.outcome, self._values())

    def _refuse_changes(self, compiled: Any) -> None:
        changes = compiled.outcome.python_changes
        if changes is not None and changes.replacement is not None:
            raise PortError(
                f"{type(self._user).__name__} exchanges submodules while it is called",
                code="TPU405",
                remedy="leave this class to eager PyTorch: porting(eager=(...)), or --eager",
            )
        super()._refuse_changes(compiled)
        self._left.refuse_lost_parameters(self._tree)

    def _apply_python_state(self, compiled: Any, changes: Any) -> None:
        super()._apply_python_state(compiled, changes)
        self._python_changes.append(changes)

    def _give_back(self, before: dict[str, Any]) -> None:
        """Write to the user's module what the call changed."""
        replaced: dict[str, torch.Tensor] = {}
        for name, value in self._values().items():
            leaf = self._tree.leaves.get(name)
            if before.get(name) is value or leaf is None:
                continue
            if isinstance(leaf, torch.Tensor):
                made = self._given(name, leaf, value)
                if made is not None:
                    replaced[name] = made
            elif name in self._tracer.numbers:
                fqn, attribute = self._tree.owners[name]
                vars(self._user.get_submodule(fqn))[attribute] = type(leaf)(value)
        self._replace(replaced)
        for change in self._python_changes:
            self._give_python_state(change)
        if self._left.shares:
            # The next program has to see which tensors share memory.
            self._structures.shares = True
            self._replace_module(clone_module(self._user, lambda t: t)[0])
        if self._python_changes or self._left.shares:
            known = self._structures.now
            self._structures.find(self._state_changes, self._values(), known.unread, known.outside)
            self._tree = self._structures.tree()
            self._tracer.unread = self._structures.now.unread
            self._keys |= self._leaf_keys.of_all(self._tree)

    def _given(self, name: str, leaf: torch.Tensor, value: jax.Array) -> torch.Tensor | None:
        """Write to a tensor of the user's, or return another one for it if the call bound that.

        References to the old tensor keep the old values then.
        """
        if name in self._left.bound and not isinstance(leaf, torch.nn.Parameter):
            return self._left.tensor(name)
        flowing = self._left.flowing.get(name)
        with torch.set_grad_enabled(flowing is not None):  # its graph goes on from there
            leaf.copy_(backend.to_torch(value, leaf.dtype) if flowing is None else flowing)
        self._keys[name] = self._leaf_keys.of(name, leaf, name in self._tree.registered)
        return None

    def _replace(self, replaced: dict[str, torch.Tensor]) -> None:
        """Put tensors for others, by name, wherever the user's module holds these."""
        tree = self._tree
        new = {id(tree.leaves[name]): tensor for name, tensor in replaced.items()}
        cloner = Cloner(lambda tensor: new.get(id(tensor), tensor))
        if any(name not in tree.owners for name in replaced):
            cloner.memo.update({id(m): m for m in self._user.modules()})
        owners = {full: tree.owners[full] for full in tree.attributes_of(replaced)}
        held = [(self._user.get_submodule(fqn), attribute) for fqn, attribute in owners.values()]
        put([(owner, owner, attribute) for owner, attribute in held], cloner)
        for full, (owner, attribute) in zip(owners, held, strict=True):
            # Or the tree would keep the old tensor alive, with its graph.
            tree.values[full] = owner._buffers.get(attribute, vars(owner).get(attribute))
        for name, tensor in replaced.items():
            tree.leaves[name] = tensor
            self._keys[name] = self._leaf_keys.of(name, tensor, name in tree.registered)

    def _give_python_state(self, changes: Any) -> None:
        """Set attributes of the user's modules as the call left them on the ported copy."""
        master, values = self._module, self._values()
        names = state_tree(master).names_in(changes.names)

        def back(tensor: torch.Tensor) -> torch.Tensor:
            name = names.get(id(tensor), "")
            known, value = self._tree.leaves.get(name), values.get(name)
            if name in self._left.leaves:
                return self._left.leaf(name, tensor)
            if tensor.device.type != "meta" and name not in self._tree.registered:
                if self._left.is_old(name) or self._left.has(name):
                    return self._left.tensor(name)  # with what the call wrote to it
                made_here = id(tensor) in changes.constants
                return self._left.constant(name, tensor) if made_here else tensor
            if isinstance(known, torch.Tensor):
                same = tensor.shape == known.shape and tensor.dtype == known.dtype
                is_kept = name not in self._left.bound or isinstance(known, torch.nn.Parameter)
                if same and is_kept:
                    return known
            if self._left.has(name):
                return self._left.tensor(name)
            if value is None:
                return tensor
            return gradients.host_tensor(value, tensor.dtype, tensor)

        cloner = Cloner(back)
        cloner.memo.update({id(m): self._user.get_submodule(f) for f, m in master.named_modules()})
        owners = [changes.owners[name] for name in changes.names]
        user, copy = self._user.get_submodule, master.get_submodule
        put([(user(fqn), copy(fqn), attribute) for fqn, attribute in owners], cloner)
        changes.put_numbers(self._user, values)
        changes.put_hooks_and_flags(self._user)

    # -- running -----------------------------------------------------------------------------------

    def _result(self, value: Any, meta: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value
        if isinstance(meta, arguments.Unsized):
            made = self._trimmed(value, meta)
            return [row.clone() for row in made.unbind(0)] if meta.is_list else made
        made = arguments.from_program(value, meta)
        if not isinstance(made, torch.Tensor):
            return made
        host = gradients.host_tensor(made.jax(), made.dtype, meta)  # type: ignore[attr-defined]
        if made._or_number:  # type: ignore[attr-defined]
            host._or_number = True  # type: ignore[attr-defined]  (verification asks for it)
        return host

    def _trimmed(self, value: Any, meta: arguments.Unsized) -> torch.Tensor:
        """Return the real elements of a result whose size depends on data.

        torch takes them, as XLA would compile a program for each length.
        """
        array, sizes = value
        made = gradients.host_tensor(array, meta.dtype)
        with torch._C.DisableTorchFunction():
            for dim, size in zip(meta.dims, sizes, strict=True):
                made = made.narrow(dim, 0, int(size))
            return tag(made.contiguous())

    def _share(self, call: BoundCall, given: list[Any]) -> None:
        """Return outputs that alias an argument or weight as that tensor or view, like eager."""
        outcome = call.compiled.outcome
        self._buffer_results.clear()
        self._left.share(outcome, self._tree.leaves, call.leaves, given)
        metas = [*outcome.out_metas, *outcome.put_metas]
        for index, alias in outcome.out_aliases.items():
            if index in outcome.returned:
                continue
            owner, at = owner_of(alias, self._tree.leaves, call.leaves), alias.of
            if at in outcome.changed or (isinstance(at, str) and at not in self._tree.leaves):
                self._buffer_results.append((given[index], alias))
            if isinstance(at, str) and at not in outcome.changed | outcome.bound:
                owner = self._tree.leaves.get(at)
            if not isinstance(owner, torch.Tensor) or alias.is_written:
                continue
            if alias.is_same:
                given[index] = owner
            else:
                given[index] = part_of(owner, alias, given[index], metas[index])

    def _run(
        self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        if self._is_composed(method):
            self._structures.note_reads(AttributeReads(everything=True))  # by code on the host
            return super()._run(method, args, kwargs)
        wanted, tensors = self._differentiated(args, kwargs)
        self._wanted = wanted if tensors else None
        prepared = self._prepare(method, args, kwargs)
        if self._wanted is None and prepared.compiled.outcome.new_leaves:
            if torch.is_grad_enabled():  # nothing else is differentiated
                self._wanted = wanted
                prepared = self._prepare(method, args, kwargs)
        with trained_flags.late(self._tracer, self._user, prepared.compiled.outcome) as late:
            if late:
                self._take_in()
                return self._run(method, args, kwargs)
        if self._wanted is None:
            return self._finish(prepared, prepared.run()), prepared.state
        trained_flags.begin(tensors)
        call = gradients.DifferentiatedCall(prepared, wanted, type(self._user).__name__)
        self._compared = call if self._verifying else None
        saved = self._saved_inputs.get(self._path_of(method, args, kwargs), Saved())
        call.saved = self._saved_tensors(saved, prepared)
        flows = gradients.Through.apply(call, *call.inputs(tensors))
        results, self._left.flowing = call.results(list(flows))
        self._left.leaves, self._left.written = call.leaves_by_name(), call.written_indices()
        out = self._finish(prepared, results)
        kept = kept_results(saved, call.values, out, self._left.flowing)
        call.others_saved = kept + kept_buffers(saved, prepared, self._tree)
        call.arrays.clear()
        return out, prepared.state

    def _refresh(self) -> None:
        """Give the copy the values of attributes that have not counted so far."""
        if self._structures.now.unread:
            self._replace_module(clone_module(self._user, lambda t: t)[0])

    def _verified_call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._refresh()
        return super()._verified_call(method, args, kwargs)

    def _traced(
        self, signature: Signature, state: dict[str, Any], given: CallArguments
    ) -> tuple[CachedProgram, Any]:
        self._refresh()
        reads = AttributeReads()
        with recorded(self._user, reads):
            made = super()._traced(signature, state, given)
        changes = made[0].outcome.python_changes
        reads.names.update(() if changes is None else changes.names)
        reads.everything = self._tracer.fallback is not None
        if self._structures.note_reads(reads):
            self._tree = self._structures.tree()
            for name, leaf in self._tree.leaves.items():
                registered = name in self._tree.registered
                self._keys.setdefault(name, self._leaf_keys.of(name, leaf, registered))
            self._tracer.held, self._tracer.unread = self._tree.leaves, self._structures.now.unread
        return made

    def _version_of_state(self) -> int:
        # With the number of its structure, the names say which program a state takes. A module
        # that a script resets (`net.hidden = None`) comes back to programs that it had.
        if self._named_at != self._state_version:
            known = frozenset(self.params) | frozenset(self.buffers)
            names = known, frozenset(self._tracer.numbers)
            self._named = self._names_seen.setdefault(names, len(self._names_seen))
            self._named_at = self._state_version
        return self._named

    # `Structures` notes them, with what is outside of the module.
    _note_structure = _find_version = PortedModel._new_version

    def _variant(self) -> Any:
        return self._wanted, self._structures.now.number

    def _transformed(self, pure: Any, paths: list[str], outcome: Any) -> Any:
        settings = active()
        if settings is not None:
            settings.calls.traces += 1
        if self._wanted is None:
            return pure
        registered, params = self._tree.registered, self.params

        def labels(state: Any, written: Any, put: Any, code: Any) -> dict[str, Any]:
            del code
            known = outcome()
            metas, flowing = known.state_metas, known.flows.state
            # What a kernel writes to a buffer, such as a running mean, has no gradient in torch; a
            # parameter is a leaf, whatever is written to it.
            found = {
                f"the {'buffer' if n in registered else 'attribute'} {n!r}": v
                for n, v in state.items()
                if n not in flowing and n not in params
                if n not in registered or metas[n].requires_grad
            }
            found |= {
                f"the argument {arguments.argument_name(paths[int(i)])}": v
                for i, v in written.items()
            }
            return found | {f"an object among the arguments ({i})": v for i, v in enumerate(put)}

        return gradients.differentiable(pure, self._wanted, labels, outcome)

    def _differentiated(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[gradients.Wanted, list[torch.Tensor]]:
        """Return the names and numbers of the inputs that require grad, and their tensors."""
        if not torch.is_grad_enabled():
            return ((), ()), []
        leaves, _, _ = arguments.flatten_call((args, kwargs))
        named = {n: t for n, t in self._tree.leaves.items() if n in self.params}
        indices = [
            i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad
        ]
        tensors = [*named.values(), *(leaves[i] for i in indices)]
        return (tuple(named), tuple(indices)), tensors

    def _differentiates(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return bool(self._differentiated(args, kwargs)[1])

    def _path_of(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Other sizes take the same path; the other training mode or another option does not.
        key: Any = arguments.flatten_call((args, kwargs))[1].key
        if self._fit is not None:
            key = self._fit.path
        if self._is_composed(method):
            key = len(args), frozenset(kwargs)
        return (
            method,
            key,
            self._version_of_state(),
            self._structures.now.number,
            torch.is_grad_enabled(),
        )

    def _note_saved(self, path: Any, expected: Reference) -> None:
        self._saved_inputs[path] = saved_inputs(expected)

    def _saved_tensors(self, saved: Saved, call: BoundCall) -> dict[str | int, torch.Tensor]:
        """Return the parameters and arguments of a call that eager would save for backward."""
        outcome = call.compiled.outcome
        found = {n: self._tree.leaves.get(n) for n in saved.names if n not in outcome.changed}
        if outcome.argument_changes is None:  # numbers of arguments are those of before the call
            found |= {i: call.leaves[i] for i in saved.arguments}
        tensors = ((k, t) for k, t in found.items() if isinstance(t, torch.Tensor))
        return {key: tensor for key, tensor in tensors if not tensor.is_inference()}

    def _gradient_pairs(self, expected: Reference, out: Any, given: Any) -> list[Any]:
        """Pair the gradients of a random projection of the outputs, parameter by parameter."""
        call, self._compared = self._compared, None
        if parity.are_left_out():
            return []
        assert call is not None
        theirs = expected.parameters()
        # The call may have ended that a parameter requires grad.
        ours = {n: t for n, t in self._tree.leaves.items() if n in self.params and t.requires_grad}
        # Tensors that `torch.func.functional_call` swaps in have no graph in eager's copy.
        ours = {n: t for n, t in ours.items() if n in theirs and isinstance(t, torch.nn.Parameter)}
        # Eager's copy begins at the arguments and the state. Ours may come from the same
        # parameters, by an earlier call or if the script tied them to those of another module.
        given_before = (*arguments.flatten_call(given)[0], *self._tree.leaves.values())
        written = call.written()
        tensors = (t for t in given_before if isinstance(t, torch.Tensor))
        made = {id(t) for t in tensors if t.grad_fn is not None} - set(map(id, written))
        results = pytree.flatten(out)[0]
        sums = parity.projected([t.detach() if id(t) in made else t for t in results])
        state = self._left.of_eager(expected)
        sums += parity.projected([*self._left.flowing.values(), *written])
        if not ours or not (sums or parity.projected((expected.out, state))):
            return []
        try:
            want = parity.of_reference(expected, keep=True, state=state)
        except RuntimeError as error:
            # Eager raises only in a backward pass, which the script may never ask for.
            self.report.notes.append(f"gradients were not compared, eager has none: {error}")
            if self._last_program is not None:
                refused = parity.refused(expected)
                self._last_program.run.derived[gradients.REFUSED] = refused
            return []
        with call.compared():
            have = gradients.gradients(sums, list(ours.values()), retain_graph=True)
        self._verifier.kept = jax.tree.leaves(call.pull)
        return parity.paired(want, dict(zip(ours, have, strict=True)))

    def _eager_gradients(self, found: Reference) -> dict[str, Any]:
        return parity.of_reference(found, state=self._left.of_eager(found))
