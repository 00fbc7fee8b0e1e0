"""Equivalence of two functions: results, exceptions, output, warnings, changed arguments."""

import contextlib
import copy
import importlib.util
import io
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

Inputs = tuple[Any, ...]
SEEDS = 8
_numbers = itertools.count()


class DifferenceError(AssertionError):
    """Raised when two functions differ that should be equivalent."""


@dataclass(frozen=True)
class CaseOutcome:
    """The observable effects of a call.

    Attributes:
        value: The return value, or None if it raised.
        error: The class and message of the exception it raised, or None.
        printed: The text written to standard output.
        warned: Class and message of each warning.
        arguments: The arguments after the call.
    """

    value: Any
    error: tuple[type[Exception], str] | None
    printed: str
    warned: tuple[tuple[type[Warning], str], ...]
    arguments: Inputs


def observe(function: Callable[..., Any], args: Inputs) -> CaseOutcome:
    """Call a function with copies of the arguments and record its effects."""
    copies = tuple(_copied(arg) for arg in args)
    value, error = None, None
    with (
        _every_warning(),
        warnings.catch_warnings(record=True) as warned,
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        warnings.simplefilter("always")
        try:
            value = function(*copies)
        except Exception as raised:  # any exception is part of the comparison
            # A rewrite may turn a global into a local or the reverse: then an unbound name raises
            # UnboundLocalError in place of NameError, with another message.
            unbound = isinstance(raised, NameError)
            error = (NameError, "") if unbound else (type(raised), str(raised))
    messages = tuple((w.category, str(w.message)) for w in warned)
    return CaseOutcome(value, error, printed.getvalue(), messages, copies)


@contextlib.contextmanager
def _every_warning() -> Iterator[None]:
    """Let torch warn on every call: it shows some warnings only once per process."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(before)


def _copied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return copy.copy_(value.detach()).requires_grad_(value.requires_grad)


def difference(expected: Any, got: Any, *, rtol: float = 0.0) -> str | None:
    """Describe how two values differ; return None if they agree.

    Args:
        expected: A tensor, or a tuple, list or dict of values, or any value with an equality.
        got: The value to compare with it; types, dtypes and shapes must be the same.
        rtol: Largest error relative to the largest expected magnitude; 0 asks for equal values,
            where NaN equals NaN.
    """
    if type(expected) is not type(got):
        return f"expected a {type(expected).__name__}, got a {type(got).__name__}"
    if isinstance(expected, torch.Tensor):
        return _tensor_difference(expected.detach(), got.detach(), rtol)
    if isinstance(expected, dict):
        if list(expected) != list(got):
            return f"expected the keys {list(expected)}, got {list(got)}"
        pairs = [(f"[{key!r}]", expected[key], got[key]) for key in expected]
    elif isinstance(expected, tuple | list):
        if len(expected) != len(got):
            return f"expected {len(expected)} values, got {len(got)}"
        both = zip(expected, got, strict=True)
        pairs = [(f"[{index}]", first, second) for index, (first, second) in enumerate(both)]
    else:
        same = expected == got or (expected != expected and got != got)
        return None if same else f"expected {expected!r}, got {got!r}"
    for path, first, second in pairs:
        found = difference(first, second, rtol=rtol)
        if found is not None:
            return f"{path}: {found}"
    return None


def _tensor_difference(expected: torch.Tensor, got: torch.Tensor, rtol: float) -> str | None:
    if expected.shape != got.shape or expected.dtype != got.dtype:
        wanted = f"{expected.dtype} {tuple(expected.shape)}"
        return f"expected {wanted}, got {got.dtype} {tuple(got.shape)}"
    if not expected.numel():
        return None
    first, second = expected.to(torch.float64), got.to(torch.float64)
    finite = first.isfinite()
    if not torch.equal(finite, second.isfinite()):
        return "some values are finite in one and not in the other"
    if not torch.equal(first[~finite].nan_to_num(), second[~finite].nan_to_num()):
        return "infinities or NaN in different places"
    error = (first - second)[finite].abs()
    limit = rtol * float(first[finite].abs().max()) if finite.any() else 0.0
    if error.numel() and float(error.max()) > limit:
        return f"differs by up to {float(error.max()):.3g} where {limit:.3g} is allowed"
    return None


def compare(expected: CaseOutcome, got: CaseOutcome, *, rtol: float = 0.0) -> str | None:
    """Describe how two outcomes differ: exception, output, warnings, result, arguments."""
    for name in ("error", "printed", "warned"):
        first, second = getattr(expected, name), getattr(got, name)
        if first != second:
            return f"{name}: expected {first!r}, got {second!r}"
    for name in ("value", "arguments"):
        found = difference(getattr(expected, name), getattr(got, name), rtol=rtol)
        if found is not None:
            return f"{name}: {found}"
    return None


def adversarial(args: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Yield variants of inputs that break careless rewrites, with all tensors changed alike."""
    for name, bend in _BENT.items():
        yield name, tuple(bend(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)


def _non_contiguous(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x, torch.zeros_like(x)], dim=-1)[..., 0]


def _with_first(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def bend(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        if x.is_floating_point() and x.numel():
            x.view(-1)[0] = value
        return x

    return bend


_BENT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "one rank more": lambda x: x.unsqueeze(0),
    "one rank less": lambda x: x[0] if x.ndim and len(x) else x,
    "rank 0": lambda x: x.reshape(-1)[0] if x.numel() else x.new_zeros(()),
    "size 0": lambda x: x[:0] if x.ndim else x,
    "size 1": lambda x: x[tuple(slice(1) for _ in x.shape)],
    "bfloat16": lambda x: x.bfloat16() if x.is_floating_point() else x,
    "integers": lambda x: x.long(),
    "NaN": _with_first(float("nan")),
    "infinity": _with_first(float("inf")),
    "all NaN": lambda x: x * float("nan") if x.is_floating_point() else x,
    "zeros": torch.zeros_like,
    "negated": lambda x: -x if x.is_floating_point() else x,
    "large": lambda x: x * 1000 if x.is_floating_point() else x,
    "not contiguous": _non_contiguous,
    "with gradient": lambda x: x.clone().requires_grad_() if x.is_floating_point() else x,
}


def load(source: str, folder: Path, *, name: str = "forward") -> Callable[..., Any]:
    """Load a function or module instance from source, through a file so that it has a source.

    Args:
        source: The source of a Python module.
        folder: The folder to write the file to.
        name: The name of the function or instance.
    """
    number = next(_numbers)
    path = folder / f"example_{number}.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(f"tpuport_example_{number}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, name)


def make_inputs(expression: str, *, seeds: int = SEEDS) -> list[Inputs]:
    """Evaluate an expression for a tuple of arguments once for each seed."""
    made: list[Inputs] = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        made.append(eval(expression, {"torch": torch}))  # the expression is a rule's own
    return made


def check_eager(
    before: Callable[..., Any],
    after: Callable[..., Any],
    inputs: Sequence[Inputs],
    *,
    rtol: float = 0.0,
) -> None:
    """Check that two functions are equivalent on inputs and on adversarial variants of them.

    Raises:
        DifferenceError: they differ; the message names the input and the first difference.
    """
    cases = [(f"seed {seed}", args) for seed, args in enumerate(inputs)]
    cases += [(f"{name}, seed 0", args) for name, args in adversarial(inputs[0])]
    for name, args in cases:
        found = compare(observe(before, args), observe(after, args), rtol=rtol)
        if found is not None:
            raise DifferenceError(f"{name}: {found}")


def check_ported(
    reference: Callable[..., Any],
    function: Callable[..., Any],
    inputs: Sequence[Inputs],
    *,
    rtol: float = 1e-5,
) -> None:
    """Check that a ported function returns what eager PyTorch returns, from one trace.

    Args:
        reference: The function to call eagerly.
        function: The function to port with the first inputs and to call with all of them.
        inputs: Arguments of the same shapes and dtypes.
        rtol: Largest error relative to the largest expected magnitude.

    Raises:
        DifferenceError: a result differs, or the function was traced again.
    """
    import tpuport
    from tpuport.testing.retrace import TraceCounter

    counter = TraceCounter(function)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")  # the port runs the function eagerly, too
        ported = tpuport.convert(counter.counted, args=inputs[0])
        ported(*inputs[0])
    traces = counter.count
    for seed, args in enumerate(inputs):
        expected = observe(reference, args)
        got = observe(lambda *args: tpuport.to_torch(ported(*args)), args)
        # A program prints and warns when it is traced, not when it runs.
        got = replace(got, printed=expected.printed, warned=expected.warned)
        found = compare(expected, got, rtol=rtol)
        if found is not None:
            raise DifferenceError(f"seed {seed}: {found}")
    if counter.count != traces:
        raise DifferenceError("the ported function was traced again for the same shapes")


def plain_jit(function: Callable[..., Any], args: Inputs) -> Any:
    """Run a function or module under `jax.jit` and torchax alone; return CPU tensors.

    Raises:
        Exception: any exception of jax or torchax.
    """
    return PlainProgram(function)(*args)


class PlainProgram:
    """A function or module as one `jax.jit` through torchax alone, for repeated calls.

    Parameters and buffers of a module become arguments of the program, as torchax's documentation
    shows. Values that a call stores in the module's attributes stay there.

    Args:
        function: A function of tensors, or a module, which is copied.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        import torchax
        from torchax import interop

        self._environment = torchax.default_env()
        self._state: dict[str, torch.Tensor] = {}
        self._call = function
        if isinstance(function, torch.nn.Module):
            module = copy.deepcopy(function)
            with self._environment:
                module.to("jax")
                self._state = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            self._call = partial(torch.func.functional_call, module)
        self._jitted = interop.jax_jit(self.pure)

    def pure(self, state: dict[str, torch.Tensor], args: Inputs) -> Any:
        """Compute the result from a module's tensors and arguments, all on the JAX device."""
        if isinstance(self._call, partial):
            return self._call(state, args)
        return self._call(*args)

    def __call__(self, *args: Any) -> Any:
        """Run the program on CPU tensors and return the result as CPU tensors."""
        with self._environment, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that torchax's arrays are read-only
            result = self._jitted(self._state, moved(args))
            return tree_map_only(torch.Tensor, lambda x: x.cpu(), result)


def moved(args: Inputs) -> Inputs:
    """Move the tensors among arguments to the JAX device of the active torchax environment."""
    return tuple(arg.to("jax") if isinstance(arg, torch.Tensor) else arg for arg in args)


def check_plain(
    reference: Callable[..., Any],
    function: Callable[..., Any],
    inputs: Sequence[Inputs],
    *,
    rtol: float = 1e-5,
) -> None:
    """Check that a function returns under torchax alone what eager PyTorch returns.

    Numbers count as tensors, and 64-bit dtypes as 32-bit ones, because torchax has no others.

    Args:
        reference: The function to call eagerly.
        function: The function to call under `jax.jit`.
        inputs: Arguments of each call.
        rtol: Largest error relative to the largest expected magnitude.

    Raises:
        DifferenceError: a result differs.
        Exception: any exception of jax or torchax.
    """
    for seed, args in enumerate(inputs):
        expected = observe(reference, args)
        if expected.error is not None:
            raise DifferenceError(f"seed {seed}: eager PyTorch raises {expected.error}")
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            got = plain_jit(function, args)
        found = difference(_in_32_bits(expected.value), _in_32_bits(got), rtol=rtol)
        if found is not None:
            raise DifferenceError(f"seed {seed}: {found}")


def _in_32_bits(value: Any) -> Any:
    def narrow(leaf: Any) -> torch.Tensor:
        tensor = torch.as_tensor(leaf).detach()
        return tensor.to(_NARROW.get(tensor.dtype, tensor.dtype))

    return tree_map_only((torch.Tensor, bool, int, float, complex), narrow, value)


_NARROW = {
    torch.int64: torch.int32,
    torch.float64: torch.float32,
    torch.complex128: torch.complex64,
}
