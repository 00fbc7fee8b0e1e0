"""What newer jax and older torch have in another form than the versions that are pinned."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
import torch

import tpuport
from benchmarks.newer_versions import fusion_emitters, without_emitters
from tpuport.foundation.interop.scan_params import scan_counts


@dataclass(frozen=True)
class Trees:
    """What jax 0.11 has as `ft_in` of a scan."""

    parts: tuple[tuple[None, ...], ...]

    def unpack(self) -> tuple[tuple[None, ...], ...]:
        return self.parts


def test_operands_of_a_scan_are_counted_in_either_form():
    def summed(scale: jax.Array, shift: jax.Array, rows: jax.Array) -> jax.Array:
        def step(carry: tuple[jax.Array, jax.Array, jax.Array], row: jax.Array):
            return (carry[0] + row * scale, carry[1] + row, carry[2] * shift), row

        start = (jnp.zeros(()), jnp.zeros(()), jnp.ones(()))
        return jax.lax.scan(step, start, rows)[0][0]

    jaxpr = jax.make_jaxpr(summed)(2.0, 3.0, jnp.ones(4)).jaxpr
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    assert scan_counts(scan.params) == (2, 3)
    assert scan_counts({"ft_in": Trees(((None,) * 2, (None,) * 3, (None,)))}) == (2, 3)


def test_a_custom_function_needs_no_attribute_of_torch_2_13(monkeypatch: pytest.MonkeyPatch):
    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * 3

    ported = tpuport.convert(lambda x: Tripled.apply(x), verify=False)
    owner = next(kind for kind in Tripled.__mro__ if "boxed_grads_call" in vars(kind))
    monkeypatch.delattr(owner, "boxed_grads_call")
    grad = jax.grad(lambda x: ported.apply({}, {}, None, x)[0].sum())(jnp.ones(3))
    assert grad.tolist() == [3.0] * 3


def test_xla_is_given_no_flag_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch):
    for version, known in (("0.10.2", True), ("0.11.2", False), ("1.0.0", False)):
        monkeypatch.setattr("importlib.metadata.version", lambda name, found=version: found)
        assert bool(fusion_emitters(used=True)) == bool(without_emitters()) == known
