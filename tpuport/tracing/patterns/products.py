"""Products of matrices, whose shardings on a mesh come from their operands alone.

XLA's partitioner computes a product in groups of chips. Where the result is wanted with one dim
over two axes of a mesh and another dim over the axis along which an operand's contracted dim is
sharded, it takes the chips of the two axes in the wrong order: parts of the result change places
without an error, on TPUs too (jax 0.10.2, libtpu 0.0.42.1; see test_products_on_meshes.py). So a
barrier, which is no operation of the compiled program, keeps shardings from flowing back into a
product; what reads the result has it sharded as it wants afterwards.

Without a need the partitioner should choose freely: `tpuport.sharding.mixed_axes` says for which
rules such a product may arise.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxlib.mlir.dialects import sdy

from tpuport.tracing.core.context import Trace
from tpuport.tracing.patterns.program import FlatProgram, PatternMatch, RunningValues

_PRODUCTS = ("dot_general", "ragged_dot_general")

KEPT_SHARDING = Primitive("tpuport_kept_sharding")
KEPT_SHARDING.def_impl(lambda x: x)
KEPT_SHARDING.def_abstract_eval(lambda x: x)


def find_products(program: FlatProgram, trace: Trace) -> Iterator[PatternMatch]:
    """Yield the products of a program whose rules mix axes of its mesh."""
    del trace
    for eqn in program.equations:
        if eqn.primitive.name in _PRODUCTS:
            yield PatternMatch(eqn, functools.partial(_shielded, eqn))


def _shielded(eqn: Any, values: RunningValues) -> list[jax.Array]:
    # The derivative's products end at the operands, so these get a barrier as well.
    operands = [KEPT_SHARDING.bind(values.read(atom)) for atom in eqn.invars]
    return [KEPT_SHARDING.bind(eqn.primitive.bind(*operands, **eqn.params))]


def _lower(ctx: Any, x: Any) -> list[Any]:
    del ctx
    if not jax.config.jax_use_shardy_partitioner:  # pyright: ignore[reportAttributeAccessIssue]
        return [x]
    return [sdy.PropagationBarrierOp(x, sdy.PropagationDirection.FORWARD).result]


def _transposed(cotangent: Any, _: Any) -> list[Any]:
    # The cotangent's sharding, too, comes from the product that made it.
    is_zero = type(cotangent) is ad.Zero
    return [cotangent if is_zero else KEPT_SHARDING.bind(cotangent)]


mlir.register_lowering(KEPT_SHARDING, _lower)
ad.deflinear2(KEPT_SHARDING, _transposed)
batching.defvectorized(KEPT_SHARDING)
