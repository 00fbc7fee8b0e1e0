"""Compiled for a TPU that is not there: dropout is drawn in kernels, and no scores are left."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.program.small import needs_libtpu
from tpuport.kernels.attention import AttentionOptions, Mask, Shards, attend, flash
from tpuport.sharding.topology import describe

pytestmark = needs_libtpu
IDS = jnp.zeros((2, 1100), jnp.int32)
CASES: dict[str, dict[str, Any]] = {
    "segments, bfloat16": {"mask": Mask(causal=True, q_segments=IDS[:, :900], kv_segments=IDS)},
    "window, capped, float32": {"mask": Mask(window=(40, 3)), "softcap": 5.0, "dtype": "float32"},
    "drawn again": {"most_kept": 0, "dim": 128},
    "large heads": {"dim": 256, "dtype": "float32"},
    "on a mesh": {"sharded": True},
}
# One case compiles each kernel, and the mesh is run by test_flash.py.
SLOW = CASES.keys() - {"segments, bfloat16"}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES]
)
@pytest.mark.parametrize("chip", ["v6e", pytest.param("v5e", marks=pytest.mark.slow)])
def test_it_compiles_without_scores(name: str, chip: str, monkeypatch: pytest.MonkeyPatch):
    case = dict(CASES[name])
    monkeypatch.setattr(flash, "_MOST_KEPT", case.pop("most_kept", flash._MOST_KEPT))
    dtype, dim = case.pop("dtype", "bfloat16"), case.pop("dim", 64)
    devices = np.array(describe(f"{chip}-4")).reshape(2, 2)
    mesh = Mesh(devices, ("data", "sequence"))
    shards = Shards(mesh, ("data",), (), ("sequence",)) if case.pop("sharded", False) else None
    spec = NamedSharding(mesh, P("data", None, "sequence") if shards else P())
    if shards is None:
        spec = NamedSharding(Mesh(devices[:1, :1], ("data", "sequence")), P())
    q, kv = (
        jax.ShapeDtypeStruct((2, heads, length, dim), dtype, sharding=spec)
        for heads, length in ((4, 900), (2, 1100))
    )
    key = jax.ShapeDtypeStruct((2,), "uint32", sharding=NamedSharding(spec.mesh, P()))
    options = AttentionOptions(platform="tpu", chip=chip)

    def run(q: Any, k: Any, v: Any, key: Any, grad: Any) -> Any:
        def attention(q: Any, k: Any, v: Any) -> jax.Array:
            given: dict[str, Any] = {"mask": Mask(), **case}
            return attend(q, k, v, dropout=0.1, key=key, options=options, shards=shards, **given)

        out, pull = jax.vjp(attention, q, k, v)
        return out, pull(grad)

    compiled = jax.jit(run).lower(q, kv, kv, key, q).compile()
    text: Any = compiled.as_text()
    assert flash.FORWARD in text
    assert flash.BACKWARD in text
    memory: Any = compiled.memory_analysis()
    scores = 2 * 4 * 900 * 1100 * 4 // (4 if shards else 1)
    assert memory.temp_size_in_bytes < scores
