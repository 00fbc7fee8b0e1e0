"""Every registered lowering, against eager PyTorch: values, dtypes and gradients.

The calls are in `lowering_cases/`, one table a family. All calls of some cases run as one program.

Contents:
    test_lowering            each op gives what eager gives, and is what computed it
    test_two_traces_*        an op traced twice is one program
    test_plain_torchax       what plain torchax lacks or gets wrong of it, as strict failures
    test_draw_*              random ops: the distribution, fresh numbers, generators
    test_*_registered_*      nothing is registered without a case, and reasons are true
    test_*_refused           what has no form in JAX says so
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch

from tests.exactness.plain_torchax import PlainTorchax, environment
from tests.exactness.scenario import by_tpuport, host
from tests.model.lowering_cases import (
    elementwise,
    images,
    indexing,
    layers,
    matrices,
    random,
    reductions,
)
from tests.model.lowering_cases.case import Case, Program, check
from tests.model.lowering_cases.torchax import WRONG
from tpuport.foundation.errors import PortError
from tpuport.foundation.interop import backend
from tpuport.tracing.core import lowering_registry
from tpuport.tracing.dispatch import dispatch
from tpuport.tracing.lowerings import load
from tpuport.tracing.scan_layers.jaxpr_equal import same_program

load()
TABLES = (elementwise, reductions, matrices, indexing, images, layers)
CASES: list[Case] = [case for table in TABLES for case in table.CASES]
REFUSED = {torch.ops.aten.linalg_ldl_factor_ex.default}
# They give nothing: `exactness/test_errors.py` tests what they raise.
CHECKS = {torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg}
# `test_forward_mode.py` tests what forward mode asks for.
FORWARD_MODE = {
    torch.ops.aten._has_same_storage_numel.default,
    torch.ops.aten._new_zeros_with_same_feature_meta.default,
}
# The op of tpuport.quantization is tested with it, torchvision's in exactness/test_detection.py.
REGISTERED = {
    op: entry
    for op, entry in {**lowering_registry.LOWERINGS, **lowering_registry.SPECIALS}.items()
    if not str(op).startswith(("tpuport.", "torchvision."))
}
# What eager PyTorch warns of when a test asks for the edge of an op.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def reached() -> Iterator[Counter[Any]]:
    """How often each registered function was called."""
    calls: Counter[Any] = Counter()

    def counted(op: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            calls[op] += 1
            return function(*args, **kwargs)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for op, entry in lowering_registry.LOWERINGS.items():
            wrapped = dataclasses.replace(entry, function=counted(op, entry.function))
            patch.setitem(lowering_registry.LOWERINGS, op, wrapped)
        for op, function in lowering_registry.SPECIALS.items():
            patch.setitem(lowering_registry.SPECIALS, op, counted(op, function))
        dispatch.op_info.cache_clear()
        yield calls
    dispatch.op_info.cache_clear()


# They give a Python bool: a program has as many paths as its calls of them have outcomes.
DECIDING = {torch.ops.aten.equal.default, torch.ops.aten.allclose.default}
HOST_READS = DECIDING | {torch.ops.aten._local_scalar_dense.default}


def _together(size: int) -> list[list[Case]]:
    """Cases of one table for one program: eight take half the time of eight programs."""
    alike = (
        [case for case in table.CASES if case.grad is grad and case.op not in DECIDING]
        for table in TABLES
        for grad in (True, False)
    )
    groups = [cases[n : n + size] for cases in alike for n in range(0, len(cases), size)]
    return [*groups, *([case] for case in CASES if case.op in DECIDING)]


@pytest.mark.parametrize("cases", _together(8), ids=lambda cases: f"{cases[0]} to {cases[-1]}")
def test_lowering(cases, reached):
    before = reached.copy()
    try:
        check(cases)
    except Exception:
        for case in cases:
            try:
                check([case])
            except Exception as error:
                raise AssertionError(f"{case}: {error}") from error
        raise
    found = reached - before
    wanted = Counter(case.op for case in cases)
    assert wanted <= found, f"something else computed {wanted - found}"


def _against_torchax() -> list[Any]:
    by_name: dict[str, list[Case]] = {}
    for case in CASES:
        by_name.setdefault(str(case), []).append(case)
    made = []
    for name, (which, index) in WRONG.items():
        case = by_name[name][which]
        entry = lowering_registry.LOWERINGS.get(case.op)
        reason = "it needs the trace: writes, Python values" if entry is None else entry.reason
        # As in tests/exactness/scenario.py, no line of the package runs.
        marks = [pytest.mark.slow, pytest.mark.xfail(strict=True, reason=reason)]
        one = dataclasses.replace(case, calls=(case.calls[index],))
        made.append(pytest.param(one, id=name, marks=marks))
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", _against_torchax())
def test_plain_torchax(case):
    with environment():
        check([case], PlainTorchax, values_first=True)


def test_witnesses_of_torchax_are_cases():
    """A typing error there would be an expected failure too."""
    assert set(WRONG) <= {str(case) for case in CASES}
    for case in CASES:
        assert len(Program(case).calls) == len(case.calls) > 0


# -- random ops ------------------------------------------------------------------------------------


X = torch.zeros(random.N)


@pytest.fixture(scope="module")
def drawn() -> Any:
    """What eager draws, and what two calls of one program with every draw in it give."""
    torch.manual_seed(1)
    eager = {str(d): [run(X) for run in d.run] for d in random.DRAWS}
    port = by_tpuport(lambda x: {str(d): [run(x) for run in d.run] for d in random.DRAWS})
    return eager, port(X), port(X)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of two empirical distribution functions (Kolmogorov and Smirnov)."""
    first, second = (v.flatten().double().sort().values for v in (a, b))
    at = torch.cat([first, second])
    below = [torch.searchsorted(v, at, right=True) / len(v) for v in (first, second)]
    return float((below[0] - below[1]).abs().max())


@pytest.mark.parametrize("name", [str(d) for d in random.DRAWS])
def test_draw_has_eagers_distribution(name, drawn):
    eager, *calls = (all_of[name] for all_of in drawn)
    for call in calls:
        for want, got in zip(eager, call, strict=True):
            have = host(got)
            assert have.shape == want.shape
            assert have.dtype == want.dtype
            assert distance(have, want) < 0.05


@pytest.mark.parametrize("name", [str(d) for d in random.DRAWS])
def test_draw_is_fresh_at_each_call(name, drawn):
    _, first, second = (all_of[name] for all_of in drawn)
    assert not torch.equal(host(first[0]), host(second[0]))


@pytest.mark.parametrize("op", random.GENERATED, ids=str)
def test_draw_from_a_generator(op):
    run = random.GENERATED[op]

    def program(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return run(generator) + x.to(torch.int64)

    port = by_tpuport(program)
    seeded = [port(X, torch.Generator().manual_seed(seed)) for seed in (1, 2, 1)]
    want = run(torch.Generator().manual_seed(1))
    assert distance(host(seeded[0]), want) < 0.05
    assert torch.equal(host(seeded[0]), host(seeded[2]))
    assert not torch.equal(host(seeded[0]), host(seeded[1]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.xfail(strict=True, reason="no lowering, or the same numbers at every call of a jit")
@pytest.mark.parametrize("draw", random.DRAWS, ids=str)
def test_draw_under_plain_torchax(draw):
    port = PlainTorchax(draw.run[0])
    with environment():
        first, second = port(X), port(X)
    assert not torch.equal(host(first), host(second))


# -- the registry ----------------------------------------------------------------------------------


def test_every_registered_op_has_a_case():
    # All ops on lists are ops on one tensor, by their names: tests/exactness/test_libraries.py.
    lists = {op for op in REGISTERED if str(op).startswith("aten._foreach_")}
    tested = {case.op for case in CASES} | {d.op for d in random.DRAWS} | set(random.GENERATED)
    assert set(REGISTERED) - tested - lists - REFUSED - CHECKS - FORWARD_MODE == set()
    assert tested - set(REGISTERED) == set(), "cases of ops that nothing registers"


def test_no_registered_lowering_is_dead():
    """C++ takes these apart before the dispatch sees them."""
    for op in REGISTERED:
        overloads = [op] if isinstance(op, torch._ops.OpOverload) else [op.default]
        for one in overloads:
            key = "CompositeImplicitAutograd"
            assert not torch._C._dispatch_has_kernel_for_dispatch_key(one.name(), key), one


def test_reasons_of_registered_lowerings_are_true():
    """`torchax has no lowering` stands where torchax has none, `as torchax` where none fails."""
    draws = {d.op for d in random.DRAWS}
    for op, entry in lowering_registry.LOWERINGS.items():
        name = str(op).removeprefix("aten.")
        if entry.reason == "torchax has no lowering":
            assert op not in backend.TORCHAX_OPS, name
            assert name in WRONG or op in draws, name
        elif entry.reason == lowering_registry.SAME:
            assert name not in WRONG, name


def test_ldl_factorisation_is_refused():
    """jax has none; torchax uses Cholesky's, which is nan unless positive definite."""
    port = by_tpuport(lambda x: torch.linalg.ldl_factor_ex(x))
    with pytest.raises(PortError, match="symmetric indefinite"):
        port(torch.eye(3))


def test_lu_without_pivots_multiplies_back():
    """torch has it on CUDA only: there is no eager result to compare with."""
    from tpuport.tracing.lowerings.linalg import _lu_factor, _triangles

    x = backend.to_jax(matrices.definite(2, 3, 3))
    factors, pivots, _ = jax.jit(_lu_factor, static_argnames="pivot")(x, pivot=False)
    lower, upper = _triangles(factors)
    assert backend.to_torch(pivots).tolist() == [[1, 2, 3]] * 2
    torch.testing.assert_close(backend.to_torch(lower @ upper), backend.to_torch(x))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.op not in HOST_READS], ids=str)
def test_two_traces_are_the_same_program(case):
    # Blocks are rolled, and what a call leaves behind is known, by comparing traces.
    program = Program(case)
    arrays = [backend.to_jax(tensor) for tensor in program.tensors]

    def traced() -> Any:
        ported = by_tpuport(program)
        return jax.make_jaxpr(lambda *a: ported.apply({}, {}, jax.random.key(0), *a)[0])(*arrays)

    assert same_program(traced(), traced())
