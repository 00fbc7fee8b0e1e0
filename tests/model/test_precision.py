"""Dtype policies: the numbers of eager PyTorch in the same dtypes, and what stays in float32."""

import copy
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tpuport
from tests.sharding import tiny
from tpuport import DtypePolicy
from tpuport.foundation.errors import ParityError, UsageError
from tpuport.tracing.core.tensor import TracedTensor

BF16_RTOL = 2e-2


def far(got: Any, want: Any) -> float:
    """The largest difference relative to the largest element."""
    got, want = (np.asarray(tpuport.to_numpy(v.float()), np.float64) for v in (got, want))
    return float(np.abs(got - want).max() / np.abs(want).max())


# -- models of libraries, against eager PyTorch cast by hand ---------------------------------------


def test_llama_gives_the_numbers_of_the_model_in_bfloat16():
    case = tiny.decoder()
    model = case.model.eval()
    ported = tpuport.convert(model)
    text = str(tpuport.cast(ported, "bf16"))
    assert re.search(r"LlamaForCausalLM computes in bfloat16, results in float32\n", text)
    assert re.search(r"  bfloat16  21 parameters\n  float32   2 buffers$", text)
    by_hand = copy.deepcopy(model)
    for parameter in by_hand.parameters():
        parameter.data = parameter.data.bfloat16()
    out, want = ported(*case.args, **case.kwargs), by_hand(*case.args, **case.kwargs)
    assert want.logits.dtype == torch.bfloat16
    assert out.logits.dtype == out.loss.dtype == torch.float32
    assert far(out.logits, want.logits) < BF16_RTOL
    assert far(out.loss, want.loss.detach()) < 1e-3
    # The cache is state, which the next call takes as it is.
    assert out.past_key_values.layers[0].keys.dtype == torch.bfloat16
    assert ported.report.verified
    assert ported.verify(*case.args, **case.kwargs).ok


def test_wan_keeps_what_diffusers_names_and_gives_the_numbers_of_the_cast_model():
    case = tiny.video()
    model = case.model.eval()
    ported = tpuport.convert(model, verify=False)
    report = tpuport.cast(ported, "bf16")
    kept = report.kept.keys() & report.parameters
    assert kept == {
        name
        for name, _ in model.named_parameters()
        if re.search(r"time_embedder|scale_shift_table|norm[123](\.|$)", name)
    }
    by_hand = copy.deepcopy(model)
    for name, parameter in by_hand.named_parameters():
        if name not in kept:
            parameter.data = parameter.data.bfloat16()
    video, time, text = case.args
    want = by_hand(video.bfloat16(), time, text.bfloat16(), return_dict=False)[0]
    got = ported(*case.args, return_dict=False)[0]
    assert got.dtype == torch.float32
    assert far(got, want) < BF16_RTOL
    params = {name: value for name, value in ported.params.items() if value.dtype == jnp.float32}
    assert params.keys() == kept


def test_t5_multiplies_in_float32_what_transformers_keeps_there():
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 2, "num_heads": 4}
    model = T5ForConditionalGeneration(
        T5Config(vocab_size=64, decoder_start_token_id=0, **sizes)
    ).eval()
    ids = torch.randint(1, 64, (2, 7))
    ported = tpuport.convert(model, verify=False)
    tpuport.cast(ported, "bf16")
    by_hand = copy.deepcopy(model)
    for name, parameter in by_hand.named_parameters():
        if ".wo." not in name:
            parameter.data = parameter.data.bfloat16()
    got, want = ported(ids, labels=ids), by_hand(ids, labels=ids)
    assert far(got.logits, want.logits) < BF16_RTOL
    audit = tpuport.precision_audit(ported, ids, labels=ids)
    wide = {place.module for place in audit.of("product") if place.dtypes == ("float32",) * 2}
    assert wide == {f"{part}.block.*.layer.*.DenseReluDense.wo" for part in ("encoder", "decoder")}


@pytest.mark.parametrize("make", [tiny.decoder, tiny.vit])
def test_gradients_of_master_weights_are_float32_and_those_of_eager(make: Any):
    case = make()
    case.model.eval()
    ported = tpuport.convert(case.model, verify=False)
    report = tpuport.cast(ported, "bf16_master")
    assert "held in float32" in str(report)
    assert {value.dtype for value in ported.params.values()} == {jnp.dtype("float32")}

    def loss(params: Any) -> Any:
        out, _ = ported.apply(params, ported.buffers, None, *case.args, **case.kwargs)
        return case.loss(out).astype(jnp.float32)

    grads = jax.jit(jax.grad(loss))(ported.params)
    assert {value.dtype for value in grads.values()} == {jnp.dtype("float32")}
    case.loss(case.model(*case.args, **case.kwargs)).backward()
    wanted = {name: p.grad.numpy() for name, p in case.model.named_parameters()}
    # The bias of keys has no gradient but rounding.
    floor = 0.01 * max(np.linalg.norm(want) for want in wanted.values())
    for name, want in wanted.items():
        error = np.linalg.norm(grads[name] - want) / max(np.linalg.norm(want), floor)
        assert error < 0.1, name
    assert {p.dtype for p in ported.to_torch().parameters()} == {torch.float32}
    assert ported.verify(*case.args, **case.kwargs).ok


# -- what meets ------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """The pooled context of a token refiner: a float32 mask makes it float32."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        x = self.first(x)
        weight = mask.float().unsqueeze(-1)
        pooled = (x * weight).sum(1) / weight.sum(1)
        shift = self.second(pooled)
        return x + shift.unsqueeze(1), self.norm(x.float()), torch.bmm(x.float(), x.mT)


def test_float32_that_meets_bfloat16_is_refused_without_a_policy_and_cast_under_one():
    model, x, mask = Mixed(), torch.randn(2, 5, 8), torch.ones(2, 5)
    plain = tpuport.convert(copy.deepcopy(model).bfloat16(), verify=False)
    with pytest.raises(RuntimeError, match="same dtype, but got: float32 != bfloat16"):
        plain(x.bfloat16(), mask)
    ported = tpuport.convert(model)
    tpuport.cast(ported, DtypePolicy(outputs="computed"))
    stream, normed, product = ported(x, mask)
    assert [t.dtype for t in (stream, normed, product)] == [
        torch.bfloat16,
        torch.float32,
        torch.bfloat16,
    ]
    for got, want in zip((stream, normed, product), model(x, mask), strict=True):
        assert far(got, want) < BF16_RTOL
    assert ported.verify(x, mask).ok


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 0.1 ** torch.arange(4.0))
        self.inner = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, places: torch.Tensor, target: torch.Tensor) -> Any:
        angles = torch.einsum("i,j->ij", places, self.inv_freq)
        x = self.norm(self.inner(angles.cos()))
        return angles, F.mse_loss(x, target), F.cross_entropy(x, target.argmax(1)), x


def test_tables_of_positions_losses_and_batch_norms_stay_in_float32():
    model = Rotary().train()
    places, target = torch.arange(1000.0, 1008.0), torch.rand(8, 4)
    ported = tpuport.convert(model, verify=False)
    report = tpuport.cast(ported, DtypePolicy(outputs="computed"))
    assert report.decisions["norm.weight"].why == "a batch norm"
    angles, mse, entropy, x = ported(places, target)
    assert torch.equal(tpuport.to_torch(angles), places[:, None] * model.inv_freq)
    assert mse.dtype == entropy.dtype == torch.float32
    assert x.dtype == torch.bfloat16
    assert ported.buffers["norm.running_mean"].dtype == jnp.float32
    twin = copy.deepcopy(model)
    want = twin(places, target)
    for got, other in zip((mse, entropy), want[1:3], strict=True):
        assert far(got, other) < BF16_RTOL
    assert (
        far(
            torch.as_tensor(tpuport.to_torch(ported.buffers["norm.running_mean"])),
            twin.norm.running_mean,
        )
        < BF16_RTOL
    )


def test_a_layer_computes_in_the_dtype_of_its_weight():
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(24, 4))
    ported = tpuport.convert(model, verify=False)
    policy = DtypePolicy(dtypes={"0": "fp32", "1.*": "bf16", "3.bias": torch.float32})
    report = tpuport.cast(ported, policy)
    kept = {name: one.why for name, one in report.kept.items()}
    assert kept == {
        "0.weight": "dtypes['0']",
        "0.bias": "dtypes['0']",
        "3.bias": "dtypes['3.bias']",
    }
    x = torch.randn(2, 4, 8)
    assert far(ported(x.bfloat16()), model(x)) < BF16_RTOL
    places = tpuport.precision_audit(ported, x.bfloat16()).of("product")
    assert {p.dtypes for p in places} == {("float32", "float32"), ("bfloat16", "bfloat16")}


def test_recurrent_layers_compute_in_the_dtype_of_their_weights():
    model, x = nn.LSTM(4, 4), torch.randn(3, 2, 4)
    ported = tpuport.convert(model, verify=False)
    tpuport.cast(ported, DtypePolicy(outputs="computed"))
    assert ported(x)[0].dtype == torch.bfloat16
    assert tpuport.precision_audit(ported, x).flags == ()
    assert far(ported(x)[0], model(x)[0]) < BF16_RTOL


def test_a_sum_over_what_was_broadcast_is_accumulated_in_float32():
    layer = nn.Linear(4, 4)
    ported = tpuport.convert(layer, verify=False)
    tpuport.cast(ported, "bf16")
    x = torch.ones(4096, 4)

    def loss(params: Any) -> Any:
        return ported.apply(params, ported.buffers, None, x)[0].astype(jnp.float32).sum()

    # Accumulated in bfloat16 it stops at 256.
    assert jax.grad(loss)(ported.params)["bias"].tolist() == [4096.0] * 4


# -- state -----------------------------------------------------------------------------------------


def test_shapes_are_cast_too_and_results_have_the_dtype_from_before():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    ported = tpuport.convert(model)
    tpuport.cast(ported, "bf16")
    assert {value.dtype for value in ported.params.values()} == {jnp.dtype("bfloat16")}
    assert ported.eval_shape(torch.randn(2, 8)).dtype == jnp.float32
    tpuport.cast(ported, DtypePolicy(outputs="computed"))
    assert ported.eval_shape(torch.randn(2, 8)).dtype == jnp.bfloat16


def test_back_to_torch_and_from_a_checkpoint_weights_have_the_dtype_that_they_are_held_in(tmp_path):
    model = nn.Linear(4, 4)
    ported = tpuport.convert(model)
    for policy, dtype in (("bf16", torch.bfloat16), ("bf16_master", torch.float32)):
        tpuport.cast(ported, policy)
        ported.load(model.state_dict())
        assert {p.dtype for p in ported.to_torch().parameters()} == {dtype}
        assert ported.params["weight"].dtype == jnp.dtype(str(dtype)[6:])
    torch.testing.assert_close(ported.to_torch().weight, model.weight)


def test_a_cast_call_is_compared_with_eager_under_the_policy():
    class Wrong(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            traced = isinstance(x, TracedTensor)
            return super().forward(x) * (2 if traced else 1)

    ported = tpuport.convert(Wrong(4, 4), verify=False)
    tpuport.cast(ported, "bf16")
    with pytest.raises(ParityError, match="differs from eager PyTorch"):
        ported.verify(torch.randn(2, 4), gradients=False)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (DtypePolicy(dtypes={"layer": "fp32"}), r"'layer' matches no parameter, buffer or module"),
        ("bf8", r"expected a DtypePolicy, 'bf16' or 'bf16_master', got 'bf8'"),
    ],
)
def test_a_wrong_policy_is_refused(policy: Any, message: str):
    with pytest.raises(UsageError, match=message):
        tpuport.cast(tpuport.convert(nn.Linear(2, 2)), policy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"compute": "int8"}, "compute must be a floating dtype, got 'int8'"),
        ({"outputs": "same"}, "outputs must be 'restore' or 'computed', got 'same'"),
    ],
)
def test_a_policy_checks_itself(changes: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=re.escape(message)):
        DtypePolicy(**changes)


def test_a_weight_that_does_not_fit_is_named():
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.bias[0] = torch.finfo(torch.float32).max
    with pytest.raises(UsageError, match=r"'bias' has a value that does not fit in bfloat16"):
        tpuport.cast(tpuport.convert(layer), "bf16")


# -- the audit -------------------------------------------------------------------------------------


def test_the_audit_names_the_module_and_line_of_float32_products_and_low_sums():
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.reduce_sum_p.bind(x.astype(jnp.bfloat16), axes=(0,), out_sharding=None)

    (low,) = tpuport.precision_audit(step, jnp.ones((512, 2))).flags
    assert low.flag == "sum accumulated in bfloat16"
    assert low.line.startswith("test_precision.py:")
    ported = tpuport.convert(Mixed(), verify=False)
    audit = tpuport.precision_audit(ported, torch.randn(2, 5, 8), torch.ones(2, 5))
    assert {place.module for place in audit.flags} == {"first", "second", ""}
    assert str(audit).startswith("Mixed: products 100 % float32 (by FLOPs)\n3 places flagged:\n")
    assert '"flag": "float32 product"' in audit.to_json()
    tpuport.cast(ported, "bf16")
    audit = tpuport.precision_audit(ported, torch.randn(2, 5, 8), torch.ones(2, 5))
    assert audit.flags == ()
    assert {p.module for p in audit.of("change")} >= {"first", "second"}
