"""FLOPs of a jaxpr, against numbers that follow from the shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpuport.cost import JaxprCost, count_jaxpr


def shape(*dims: int, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def count(function, *args, **options) -> JaxprCost:
    return count_jaxpr(jax.make_jaxpr(function)(*args), **options)


def test_a_product_is_two_flop_for_each_triple():
    found = count(lambda a, b: a @ b, shape(3, 5), shape(5, 7))
    assert found.flops == 2 * 3 * 5 * 7
    assert found.bytes == 4 * (3 * 5 + 5 * 7 + 3 * 7)
    (dot,) = found.dots
    assert (dot.batch, dot.rows, dot.columns, dot.contraction) == (1, 3, 7, 5)
    assert not found.unknown


def test_batch_dims_of_a_product():
    found = count(
        lambda a, b: jnp.einsum("bhqd,bhkd->bhqk", a, b), shape(2, 3, 5, 4), shape(2, 3, 6, 4)
    )
    assert found.flops == 2 * (2 * 3) * 5 * 6 * 4


def test_dtypes_of_the_operands():
    found = count(
        lambda a, b, c: (a @ b, (a.astype(jnp.float32) @ c)),
        shape(3, 5, dtype=jnp.bfloat16), shape(5, 7, dtype=jnp.bfloat16), shape(5, 11),
    )  # fmt: skip
    assert [(dot.dtypes, dot.flops) for dot in found.dots] == [
        (("bfloat16", "bfloat16"), 2 * 3 * 5 * 7),
        (("float32", "float32"), 2 * 3 * 5 * 11),
    ]


def test_the_body_of_a_scan_counts_as_often_as_it_runs():
    def run(x, ws):
        return jax.lax.scan(lambda h, w: (h @ w, None), x, ws)[0]

    assert count(run, shape(3, 4), shape(9, 4, 4)).flops == 9 * 2 * 3 * 4 * 4


def test_a_scan_in_a_scan_multiplies():
    def outer(x, w):
        inner = lambda h: jax.lax.scan(lambda g, _: (g @ w, None), h, None, length=5)[0]  # noqa: E731
        return jax.lax.scan(lambda h, _: (inner(h), None), x, None, length=7)[0]

    assert count(outer, shape(2, 4), shape(4, 4)).flops == 35 * 2 * 2 * 4 * 4


def test_a_while_loop_counts_once_and_says_so():
    def run(x, w):
        with jax.named_scope("refine"):
            return jax.lax.while_loop(lambda h: h.sum() < 9, lambda h: h @ w, x)

    found = count(run, shape(2, 4), shape(4, 4))
    assert found.flops == 2 * 2 * 4 * 4
    assert found.unknown == ("how often a while loop in refine runs; it is counted once",)


def test_a_while_loop_without_products_is_no_news():
    assert not count(
        lambda x: jax.lax.while_loop(lambda h: h < 9, lambda h: h + 1, x), shape()
    ).unknown


def test_of_a_cond_the_costliest_branch():
    def run(x, w):
        return jax.lax.cond(x.sum() > 0, lambda: x @ w @ w, lambda: x @ w)

    assert count(run, shape(2, 4), shape(4, 4)).flops == 2 * 2 * 2 * 4 * 4


def test_a_convolution():
    def run(x, w):
        return jax.lax.conv_general_dilated(
            x, w, (2, 2), "SAME", dimension_numbers=("NCHW", "OIHW", "NCHW")
        )

    # 8 x 8 positions, of 16 channels, each from 6 channels of 3 x 3.
    assert count(run, shape(2, 6, 16, 16), shape(16, 6, 3, 3)).flops == 2 * (2 * 8 * 8) * 16 * 6 * 9


def test_a_convolution_of_groups():
    def run(x, w):
        return jax.lax.conv_general_dilated(x, w, (1,), "VALID", feature_group_count=8)

    assert count(run, shape(2, 8, 10), shape(8, 1, 3)).flops == 2 * (2 * 8) * 8 * 3


def test_a_transposed_convolution_counts_no_holes():
    def run(x, w):
        return jax.lax.conv_transpose(x, w, (2,), "SAME", dimension_numbers=("NCH", "OIH", "NCH"))

    # The same work as the convolution that it is the transpose of: 10 positions of 4 x 6 x 2.
    assert count(run, shape(1, 4, 10), shape(6, 4, 2)).flops == 2 * 10 * 4 * 6 * 2


def test_attention_and_its_gradient():
    def attend(q, k, v):
        return (jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v).sum()

    q = shape(2, 4, 64, 16)
    forward = 2 * 2 * (2 * 4) * 64 * 64 * 16
    assert count(attend, q, q, q).flops == forward
    # Of two products, four more in the backward pass; p.v needs no value of its own for `sum`.
    assert count(jax.grad(attend, (0, 1, 2)), q, q, q).flops == 3 * forward


def test_what_remat_repeats_is_counted():
    def layer(x, w):
        return jnp.sin(x @ w)

    def loss(f):
        return lambda x, w: f(f(x, w), w).sum()

    x, w = shape(3, 4), shape(4, 4)
    plain = count(jax.grad(loss(layer), 1), x, w).flops
    again = count(jax.grad(loss(jax.checkpoint(layer)), 1), x, w).flops
    assert (plain, again) == (5 * 2 * 3 * 4 * 4, 7 * 2 * 3 * 4 * 4)


def test_jit_and_custom_gradients_are_looked_into():
    @jax.custom_vjp
    def product(a, b):
        return a @ b

    product.defvjp(lambda a, b: (a @ b, (a, b)), lambda r, g: (g @ r[1].T, r[0].T @ g))
    x = shape(4, 4)
    assert count(jax.jit(product), x, x).flops == 128
    assert count(jax.grad(lambda a, b: product(a, b).sum()), x, x).flops >= 2 * 128


def test_each_shard_of_a_shard_map_is_counted():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))

    def run(x, w):
        return jax.shard_map(
            lambda x, w: x @ w, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a")
        )(x, w)

    # Spread over `a`, repeated over `b`: repeated work is work.
    assert count(run, shape(16, 4), shape(4, 4)).flops == 2 * (2 * 16 * 4 * 4)


def test_modules_are_the_innermost_known_scope():
    def block(x, w):
        with jax.named_scope("blocks.0"):
            with jax.named_scope("blocks.0.mlp"), jax.named_scope("not a module"):
                x = jax.jit(lambda x: x @ w)(x)
            return x @ w

    names = {"blocks.0", "blocks.0.mlp"}
    found = count(jax.grad(lambda x, w: block(x, w).sum()), shape(4, 4), shape(4, 4), modules=names)
    assert set(found.modules) == names
    assert sum(module.flops for module in found.modules.values()) == found.flops
    with_all = count(block, shape(4, 4), shape(4, 4))
    assert set(with_all.modules) == {"blocks.0", "not a module"}


def test_modules_within_a_scan():
    def body(x, w):
        with jax.named_scope("blocks.*.fc"):
            return x @ w, None

    def run(x, ws):
        with jax.named_scope("blocks"):
            return jax.lax.scan(body, x, ws)[0]

    (name,) = count(run, shape(4, 4), shape(3, 4, 4)).modules
    assert name == "blocks.*.fc"


def test_captured_constants():
    table = np.ones((64, 32), np.float32)
    found = count(lambda x: x + jnp.asarray(table).sum(), shape(4))
    assert found.constants[0].bytes == 64 * 32 * 4
    assert found.constants[0].shape == (64, 32)


def test_arrays_of_scores_are_found():
    def attend(q, k, v):
        with jax.named_scope("attn"):
            scores = jnp.einsum("hqd,hkd->hqk", q, k)
            return jax.nn.softmax(scores) @ v

    q, k = shape(2, 64, 16), shape(2, 96, 16)
    scores = count(attend, q, k, k, score_size=64).scores
    assert {one.shape for one in scores} == {(2, 64, 96)}
    assert {one.module for one in scores} == {"attn"}
    assert scores[0].bytes == 2 * 64 * 96 * 4
    assert not count(attend, q, k, k, score_size=128).scores


def test_a_square_mask_is_a_score_array_and_a_layer_is_not():
    mask = count(lambda i: i[:, None] >= i[None, :], shape(2048, dtype=jnp.int32))
    assert [one.shape for one in mask.scores] == [(2048, 2048)]
    assert not count(lambda x, w: jax.nn.relu(x @ w), shape(4096, 2048), shape(2048, 2048)).scores


def test_ragged_products_count_a_row_once():
    def experts(x, w, sizes):
        return jax.lax.ragged_dot(x, w, sizes)

    found = count(experts, shape(12, 8), shape(4, 8, 16), shape(4, dtype=jnp.int32))
    assert found.flops == 2 * 12 * 8 * 16


@pytest.mark.parametrize("with_cost", [True, False])
def test_kernels_by_their_own_estimate_or_by_their_body(with_cost: bool):
    from jax.experimental import pallas as pl

    def body(a, b, o):
        o[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    def run(a, b):
        cost = pl.CostEstimate(flops=77, bytes_accessed=1, transcendentals=0) if with_cost else None
        return pl.pallas_call(
            body, grid=(4, 2), out_shape=shape(64, 32), name="tile", cost_estimate=cost,
            in_specs=[
                pl.BlockSpec((16, 8), lambda i, j: (i, 0)),
                pl.BlockSpec((8, 16), lambda i, j: (0, j)),
            ],
            out_specs=pl.BlockSpec((16, 16), lambda i, j: (i, j)),
        )(a, b)  # fmt: skip

    found = count(run, shape(64, 8), shape(8, 32))
    (kernel,) = found.kernels
    assert (kernel.name, kernel.grid, kernel.exact) == ("tile", (4, 2), with_cost)
    assert found.flops == (77 if with_cost else 2 * 64 * 8 * 32)


def test_work_that_is_no_product_is_said():
    found = count(jnp.fft.fft, shape(64, dtype=jnp.complex64))
    assert found.unknown == ("the FLOPs of fft",)


def test_sharded_programs_count_the_whole():
    mesh = Mesh(np.array(jax.devices()), ("x",))
    args = [jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(mesh, P("x")))] * 2
    assert count_jaxpr(jax.jit(jnp.matmul).trace(*args).jaxpr).flops == 2 * 16**3
