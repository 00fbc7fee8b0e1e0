"""Comparison of a port with eager PyTorch, on the same inputs and the same random numbers."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tpuport.foundation import pytree
from tpuport.foundation.errors import ParityError
from tpuport.foundation.interop import backend
from tpuport.foundation.interop.device_mark import tag
from tpuport.foundation.interop.seen_device import seen_device
from tpuport.foundation.patching.shim import installed
from tpuport.foundation.pytree.clone import clone_module
from tpuport.model.parity.uncheckpointed import Uncheckpointed
from tpuport.reports.records import (
    Kind,
    Parity,
)
from tpuport.tracing.core.context import KeyStream
from tpuport.tracing.core.export import to_torch
from tpuport.tracing.core.gradient_paths import value_and_grad
from tpuport.tracing.core.keys import keyed
from tpuport.tracing.core.precision_seen import RTOL, Precision, tolerance
from tpuport.tracing.core.reentrancy import part_of_program
from tpuport.tracing.core.tensor import TracedTensor, to_cpu, wrap
from tpuport.tracing.core.values import map_tensors
from tpuport.tracing.dispatch.dispatch import dispatch
from tpuport.tracing.guards import host_randomness
from tpuport.tracing.scan_layers import stacked_params
from tpuport.tracing.session.tracer import eager_compiled
from tpuport.tracing.state.module_state import state_tree


class SameNumbers(TorchDispatchMode):
    """A mode in which eager torch draws the random numbers that a port draws from `key`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, key: jax.Array) -> None:
        super().__init__()
        self.keys = KeyStream(key)
        self.generators: dict[int, KeyStream] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        generator = kwargs.get("generator")
        own = generator is not None and generator._cdata not in self.generators
        # Torch tags it as random, but it draws nothing: torch uses it only with dropout 0. Its
        # backward needs the logsumexp that the real kernel returns.
        if func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default:
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags or own:
            return func(*args, **kwargs)
        return self._draw(func, args, kwargs)

    def _draw(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        generator = kwargs.get("generator")
        if "generator" in kwargs:
            kwargs["generator"] = None
        stream = self.keys if generator is None else self.generators[generator._cdata]
        tensors: list[tuple[torch.Tensor, TracedTensor]] = []

        def lift(tensor: Any) -> Any:
            if not isinstance(tensor, torch.Tensor):
                return tensor
            lifted = wrap(backend.to_jax(tensor), tensor.dtype)
            tensors.append((tensor, lifted))
            return lifted

        lifted = [map_tensors(lift, a) for a in args]
        with keyed(stream):
            result = dispatch(func, tuple(lifted), kwargs)
        for plain, one in tensors:
            if one._storage.version:
                plain.copy_(to_cpu(one))
                if result is one:
                    result = plain
        return pytree.map_tensors(lambda t: to_cpu(t) if isinstance(t, TracedTensor) else t, result)


def eager_copy(module: torch.nn.Module, *, trainable: bool = False) -> torch.nn.Module:
    """Copy a module to run it eagerly.

    Parameters are shared (or fresh leaves if `trainable`), buffers are copied.
    """

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, torch.nn.Parameter):
            if not trainable:
                return tensor
            return torch.nn.Parameter(tensor.detach().clone(), requires_grad=tensor.requires_grad)
        return tensor.detach().clone()

    return clone_module(module, copy)[0]


class SavedTensorNeeded(BaseException):
    """Signal that a backward pass ran inside code whose saved tensors were dropped."""


def without_saved_tensors() -> Any:
    """Return a context that drops what autograd saves, so that eager takes no more memory.

    Code that asks for requires_grad or is_grad_enabled() is answered as the user's call would be.
    """

    def unpack(nothing: None) -> torch.Tensor:
        raise SavedTensorNeeded

    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, unpack)


def takes_gradients(error: BaseException) -> bool:
    """Return whether code failed without its saved tensors, because it takes gradients itself."""
    # torch.func refuses hooks on what it saves.
    return isinstance(error, SavedTensorNeeded) or "saved tensor hooks" in str(error)


class Verifier:
    """A comparison of each method's first call with eager PyTorch.

    It finds the first module that differs.
    """

    def __init__(
        self, ported: Any, target: torch.nn.Module | Callable[..., Any], rtol: float | None
    ) -> None:
        self.ported, self.target, self.rtol = ported, target, rtol
        self.done: set[Any] = set()
        self._coarsest = 0.0

    def reference(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: jax.Array,
        *,
        trainable: bool = False,
    ) -> tuple[Any, torch.nn.Module | None, tuple[Any, Any]]:
        """Run eager; return the output, the module after the call, and the arguments after the
        call.

        Grad mode is that of the caller, so that code which asks for it takes the same path.
        `trainable` keeps what a backward pass of the results needs, in parameters of its own.
        """
        given = (method, args, kwargs, key)
        if trainable:
            return self._reference(*given, torch.enable_grad(), trainable=True)
        try:
            return self._reference(*given, without_saved_tensors())
        except (SavedTensorNeeded, RuntimeError) as error:
            if not takes_gradients(error):
                raise
        return self._reference(*given, contextlib.nullcontext())

    def _reference(
        self,
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        key: jax.Array,
        grad: Any,
        *,
        trainable: bool = False,
    ) -> tuple[Any, torch.nn.Module | None, tuple[Any, Any]]:
        with self.ported.report.timed("observe"):
            module, casting = None, self.ported._tracer.casting
            function: Callable[..., Any]
            function = self.target  # type: ignore[assignment]
            own_args, own_kwargs = args, kwargs
            out: Any = None
            # Most models draw no random numbers: try without the mode that supplies them first.
            modes: list[Any] = [contextlib.nullcontext(), SameNumbers(key)]
            # A generator among the arguments needs the mode in any case.
            for mode in modes[1:] if _has_generator((args, kwargs)) else modes:
                if isinstance(self.target, torch.nn.Module):
                    module = eager_copy(self.ported._eager(), trainable=trainable)
                    function = self.ported._tracer.method(module, method)
                own_args, own_kwargs = host_arguments((args, kwargs), mode)
                _put_on_accelerator(module, self.target, (own_args, own_kwargs))
                state = torch.get_rng_state()
                seen = Precision()
                with host_randomness.restored([module, own_args, own_kwargs]):
                    with (
                        eager_compiled(),
                        installed((Uncheckpointed,)),
                        mode,
                        seen,
                        grad,
                        part_of_program(),
                        casting.in_force(),
                    ):
                        out = casting.restored(function(*own_args, **own_kwargs))
                    drew = not torch.equal(state, torch.get_rng_state())
                self._coarsest = max((RTOL[dtype] for dtype in seen.dtypes), default=0.0)
                if not drew:
                    break
            args, kwargs = own_args, own_kwargs
        return out, module, (args, kwargs)

    def _tolerance(self, dtype: torch.dtype, kind: Kind) -> float:
        accepted = tolerance(dtype, self.rtol)
        if self.rtol is not None:
            return accepted
        accepted = max(accepted, self._coarsest)
        # The backward pass rounds at each step what the forward pass has rounded already.
        lower = accepted > RTOL[torch.float32] and kind == "gradient"
        return 3 * accepted if lower else accepted

    def compare(
        self,
        kind: Kind,
        path: str,
        expected: Any,
        got: Any,
        atol: float = 0.0,
    ) -> list[Parity]:
        """Compare two structures tensor by tensor."""
        ours, _, paths = pytree.flatten_with_paths(expected, leaf=_comparable, path=path)
        theirs, _, _ = pytree.flatten_with_paths(got, leaf=_comparable, path=path)
        records = []
        if len(ours) != len(theirs):
            msg = f"eager gives {len(ours)} tensors at {path}, the port {len(theirs)}"
            raise ParityError(msg, remedy="please report this with the model")
        for want, have, where in zip(ours, theirs, paths, strict=True):
            want_torch = to_torch(want)
            have_torch = to_torch(have)
            if isinstance(have, jax.Array):
                # State has jax's dtypes (64-bit ones in 32 bits); tensors have torch's own dtype.
                have_torch = have_torch.to(want_torch.dtype)
            records.append(
                Parity.compare(
                    where,
                    _widened(want_torch),
                    _widened(have_torch),
                    kind=kind,
                    tolerance=self._tolerance(want_torch.dtype, kind),
                    atol=atol,
                    dtype=str(want_torch.dtype).removeprefix("torch."),
                )
            )
        return records


def _put_on_accelerator(module: torch.nn.Module | None, target: Any, given: Any) -> None:
    """Tag eager's tensors as on the accelerator if code sees traced tensors there."""
    if seen_device() is None:
        return
    leaves = pytree.flatten(given)[0]
    if module is not None:
        # What the copy shares with the user's module (torch's distributions) must not be tagged.
        own = {id(leaf) for leaf in state_tree(target).leaves.values()}
        leaves += [leaf for leaf in state_tree(module).leaves.values() if id(leaf) not in own]
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            tag(leaf)


def _comparable(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, jax.Array))


def _widened(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype in (torch.bfloat16, torch.float16) or (
        tensor.dtype.itemsize == 1 and tensor.is_floating_point()
    ):
        tensor = tensor.float()
    return tensor.numpy()


def host_arguments(value: Any, mode: SameNumbers) -> Any:
    """Copy call arguments to plain CPU tensors, and replace generators by the program's streams."""

    leaves, spec = pytree.flatten(value, objects=True)
    made = []
    for leaf in leaves:
        if isinstance(leaf, torch.Generator):
            # The stand-in draws from the stream that the port uses for the same argument.
            stand_in = type(leaf)()
            seed = torch.empty((), dtype=torch.int64).random_(generator=_fork(leaf)).item()
            ident = stand_in._cdata  # pyright: ignore[reportAttributeAccessIssue]  (not in the stubs)
            mode.generators[ident] = KeyStream(backend.key_of(int(seed)))
            made.append(stand_in)
        else:
            made.append(_host_copy(leaf))
    return pytree.unflatten(spec, made)


def _host_copy(leaf: Any) -> Any:
    made = to_torch(leaf)
    if not isinstance(leaf, torch.Tensor):
        return made
    made = made.detach().clone() if made is leaf else made.detach()
    # A computed tensor may be written in place, which eager refuses of a leaf with a gradient.
    return made if not leaf.requires_grad else made.requires_grad_().view_as(made)


def _has_generator(value: Any) -> bool:
    leaves, _ = pytree.flatten(value)
    return any(isinstance(leaf, torch.Generator) for leaf in leaves)


def _fork(generator: torch.Generator) -> torch.Generator:
    twin = torch.Generator()
    twin.set_state(generator.get_state())
    return twin


def gradient_parity(
    verifier: Verifier, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], key: jax.Array
) -> list[Parity]:
    """Compare the gradients of a fixed random projection of all floating outputs.

    Every trainable parameter is compared.
    """
    ported = verifier.ported
    out, module, _ = verifier.reference(method, args, kwargs, key, trainable=True)
    assert module is not None
    leaves, _ = pytree.flatten(out, leaf=_comparable)
    weights = [_projection(leaf, i) for i, leaf in enumerate(leaves)]
    total = sum(
        (leaf * torch.from_numpy(w)).sum()
        for leaf, w in zip(leaves, weights, strict=True)
        if w is not None
    )
    if not isinstance(total, torch.Tensor):
        return []
    if total.requires_grad:
        total.backward()
    leaves_after = state_tree(module).leaves.items()
    expected = {n: p.grad for n, p in leaves_after if isinstance(p, torch.nn.Parameter)}

    def loss(params: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        result, _ = ported.apply(params, ported.buffers, key, *args, method=method, **kwargs)
        ours, _ = pytree.flatten(result, leaf=_comparable)
        parts = (jnp.sum(o * w) for o, w in zip(ours, weights, strict=True) if w is not None)
        return sum(parts, jnp.zeros(())), None

    with ported._precision_scope():
        _, grads, has_gradient = jax.jit(value_and_grad(loss))(ported.params)
    # A stack has a gradient where one of its members has.
    reached, unsure = (
        {name for stack in grads if test(stack) for name in _members(stack)}
        for test in (lambda n: bool(has_gradient[n]), has_gradient.unsure.__contains__)
    )
    pairs: list[tuple[str, Any, Any]] = []
    for name, got in stacked_params.unstack(grads).items():
        want = expected.get(name)
        is_none = name not in reached or (want is None and name in unsure and not got.any())
        pairs.append((name, want, None if is_none else got))
    return gradient_records(verifier, pairs)


def _members(name: str) -> Sequence[str]:
    return stacked_params.members_of(name) or [name]


def gradient_records(verifier: Verifier, pairs: list[tuple[str, Any, Any]]) -> list[Parity]:
    """Compare gradients with eager's.

    Args:
        verifier: The verifier that compares.
        pairs: For each parameter its name, eager's gradient and the port's, None for none.
    """
    eager = [g for _, g, _ in pairs if g is not None]
    largest = max((float(g.abs().max()) for g in eager if g.numel()), default=0.0)
    noise = 1e-5 * max(1.0, verifier._coarsest / RTOL[torch.float32])
    records = []
    for name, want, got in pairs:
        if want is None or got is None:
            if want is not got:
                records.append(Parity.missing(f"grad.{name}", want, got))
            continue
        if isinstance(got, jax.Array):
            got = got.astype(backend.jax_dtype(want.dtype))
        # The absolute limit depends on the largest gradient, because one that is zero except for
        # rounding has no useful relative error.
        records += verifier.compare("gradient", f"grad.{name}", want, got, noise * largest)
    return records


def _projection(leaf: torch.Tensor, index: int) -> np.ndarray | None:
    if not leaf.dtype.is_floating_point:
        return None
    draw = np.random.default_rng(index).standard_normal(tuple(leaf.shape))
    return np.asarray(draw / max(leaf.numel(), 1) ** 0.5, np.float32)


def state_parity(
    verifier: Verifier, module: torch.nn.Module, before: dict[str, Any]
) -> list[Parity]:
    """Compare every buffer (and tensor attribute) that the call changed."""
    after = state_tree(module).leaves
    ported = verifier.ported
    records = []
    for name, value in {**ported.buffers, **ported.params}.items():
        if before.get(name) is value:
            continue
        for fqn, one in stacked_params.unstack({name: value}).items():
            if fqn in after:
                records += verifier.compare("buffer", f"buffer.{fqn}", after[fqn], one)
    for name in set(before) & set(after):
        if name not in ported.params and before[name] is ported.buffers.get(name):
            want = after[name]
            if isinstance(want, torch.Tensor) and (want.is_inference() or want._version):
                records += verifier.compare("buffer", f"buffer.{name}", want, ported.buffers[name])
    return records
