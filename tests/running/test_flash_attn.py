"""The provided flash_attn against attention written down sequence by sequence in float64."""

import importlib.metadata
import math
import sys
from typing import Any

import jax
import numpy as np
import pytest
import torch

import tpuport
from tests.attention_call.programs import KERNELS
from tpuport.foundation.errors import UsageError

RTOL = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def naive(q, k, v, *, scale=None, causal=False, window=(-1, -1), softcap=0.0, slopes=None):
    """One sequence, one head at a time: q [L, H, D] over k and v [S, G, D], in float64."""
    (length, heads, dim), (keys, groups, _) = q.shape, k.shape
    q, k, v = q.double(), k.double(), v.double()
    rows = []
    for i in range(length):
        own = i + keys - length
        for h in range(heads):
            g = h // (heads // groups)
            allowed = [
                j
                for j in range(keys)
                if (not causal or j <= own)
                and (window[0] < 0 or j >= own - window[0])
                and (window[1] < 0 or j <= own + window[1])
            ]
            if not allowed:
                rows.append((v[:1, g] * 0).sum(0))
                continue
            s = (k[allowed, g] @ q[i, h]) * (scale or 1 / math.sqrt(dim))
            s = softcap * torch.tanh(s / softcap) if softcap else s
            if slopes is not None:
                s = s - slopes[h].double() * (torch.tensor(allowed) - own).abs()
            rows.append(torch.softmax(s, 0) @ v[allowed, g])
    return torch.stack(rows).view(length, heads, -1)


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert ours.dtype == dtype
    worst = (ours.double() - theirs).abs().max()
    assert worst <= RTOL[dtype] * theirs.abs().max().clamp(min=1e-3), worst


@pytest.fixture
def flash():
    with tpuport.porting():
        import flash_attn

        yield flash_attn


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


class Call(torch.nn.Module):
    """A function as a module, so that `convert` traces it."""

    def __init__(self, function: Any, **options: Any) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, *args: Any) -> Any:
        return self.function(*args, **self.options)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
CASES = [
    ({}, {}),
    ({"causal": True}, {"causal": True}),
    ({"softmax_scale": 0.3}, {"scale": 0.3}),
    ({"window_size": (2, 1)}, {"window": (2, 1)}),
    ({"causal": True, "window_size": (2, -1)}, {"causal": True, "window": (2, -1)}),
    ({"softcap": 1.5, "causal": True}, {"softcap": 1.5, "causal": True}),
    ({"alibi_slopes": SLOPES, "causal": True}, {"slopes": SLOPES, "causal": True}),
    ({"deterministic": True}, {}),
]


@pytest.mark.parametrize("dtype", RTOL, ids=str)
@pytest.mark.parametrize("sizes", [(6, 6), (4, 7), (7, 4)], ids=str)
@pytest.mark.parametrize(("options", "meaning"), CASES)
def test_dense_values(flash, options, meaning, sizes, dtype):
    q, k, v = tensors((2, sizes[0], 4, 8), (2, sizes[1], 2, 8), (2, sizes[1], 2, 8), dtype=dtype)
    out = flash.flash_attn_func(q, k, v, **options)
    want = torch.stack([naive(q[b], k[b], v[b], **meaning) for b in range(2)])
    close(out, want, dtype)


@pytest.mark.parametrize(("options", "meaning"), CASES)
def test_dense_gradients_where_some_rows_see_nothing(flash, options, meaning):
    operands = tensors((2, 7, 4, 8), (2, 4, 1, 8), (2, 4, 1, 8))
    weight = torch.randn(2, 7, 4, 8)
    (flash.flash_attn_func(*operands, **options) * weight).sum().backward()
    ours = [x.grad.clone() for x in operands]
    for x in operands:
        x.grad = None
    want = torch.stack([naive(*(x[b] for x in operands), **meaning) for b in range(2)])
    (want * weight).sum().backward()
    for got, x in zip(ours, operands, strict=True):
        close(got, x.grad.double())


@pytest.mark.parametrize(("options", "meaning"), CASES)
def test_dense_in_a_program(flash, options, meaning):
    with torch.no_grad():
        q, k, v = tensors((2, 4, 4, 8), (2, 7, 2, 8), (2, 7, 2, 8))
        ported = tpuport.convert(Call(flash.flash_attn_func, **options))
        want = torch.stack([naive(q[b], k[b], v[b], **meaning) for b in range(2)])
        close(tpuport.to_torch(ported(q, k, v)), want)


def test_packed_forms_are_the_same_function(flash):
    (qkv,) = tensors((2, 5, 3, 4, 8))
    want = flash.flash_attn_func(*qkv.unbind(2), causal=True)
    torch.testing.assert_close(flash.flash_attn_qkvpacked_func(qkv, causal=True), want)
    kv = qkv[:, :, 1:]
    torch.testing.assert_close(flash.flash_attn_kvpacked_func(qkv[:, :, 0], kv, causal=True), want)


def split(x: torch.Tensor, starts: torch.Tensor) -> list[torch.Tensor]:
    return [x[a:b] for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]


Q_STARTS = torch.tensor([0, 3, 3, 9], dtype=torch.int32)
K_STARTS = torch.tensor([0, 5, 7, 11], dtype=torch.int32)


def packed(q, k, v, **meaning):
    """The sequences one by one; rows after the last give zeros."""
    parts = [
        naive(*one, **meaning)
        for one in zip(split(q, Q_STARTS), split(k, K_STARTS), split(v, K_STARTS), strict=True)
        if len(one[0])
    ]
    done = torch.cat(parts)
    return torch.cat([done, done.new_zeros(len(q) - len(done), *done.shape[1:])])


@pytest.mark.parametrize(("options", "meaning"), CASES)
def test_varlen_values_and_gradients(flash, options, meaning):
    # An empty sequence, queries that outnumber their keys, and rows after the last sequence.
    operands = tensors((10, 4, 8), (12, 2, 8), (12, 2, 8))
    out = flash.flash_attn_varlen_func(*operands, Q_STARTS, K_STARTS, 6, 5, **options)
    want = packed(*operands, **meaning)
    close(out, want.detach())
    weight = torch.randn(out.shape)
    ours = torch.autograd.grad((out * weight).sum(), operands)
    theirs = torch.autograd.grad((want * weight).sum(), operands)
    for got, expected in zip(ours, theirs, strict=True):
        close(got, expected.double())


@pytest.mark.parametrize(("options", "meaning"), CASES)
def test_varlen_in_one_program_for_all_lengths(flash, options, meaning):
    function = flash.flash_attn_varlen_func

    def call(q, k, v, starts, keys):
        return function(q, k, v, starts, keys, 6, 5, **options)

    ported = tpuport.convert(Call(call))
    with torch.no_grad():
        operands = tensors((10, 4, 8), (12, 2, 8), (12, 2, 8))
        others = torch.tensor([0, 2, 4, 10], dtype=torch.int32), torch.tensor([0, 4, 8, 12])
        ported(*operands, others[0], others[1].int())
        out = ported(*operands, Q_STARTS, K_STARTS)
        close(tpuport.to_torch(out), packed(*operands, **meaning))
    assert ported.report.retraces == []


def test_varlen_slopes_of_each_sequence(flash):
    q, k, v = tensors((9, 4, 8), (11, 2, 8), (11, 2, 8))
    slopes = torch.rand(3, 4)
    out = flash.flash_attn_varlen_func(q, k, v, Q_STARTS, K_STARTS, 6, 5, alibi_slopes=slopes)
    pieces = zip(split(q, Q_STARTS), split(k, K_STARTS), split(v, K_STARTS), slopes, strict=True)
    want = torch.cat([naive(a, b, c, slopes=s) for a, b, c, s in pieces if len(a)])
    close(out, want)


def test_varlen_packed_forms_are_the_same_function(flash):
    (qkv,) = tensors((9, 3, 4, 8))
    lengths = (Q_STARTS, Q_STARTS, 6, 6)
    want = flash.flash_attn_varlen_func(*qkv.unbind(1), *lengths, causal=True)
    ours = flash.flash_attn_varlen_qkvpacked_func(qkv, Q_STARTS, 6, causal=True)
    torch.testing.assert_close(ours, want)
    ours = flash.flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], *lengths, causal=True)
    torch.testing.assert_close(ours, want)


def test_dropout_drops_weights_and_keeps_the_mean(flash):
    q, k = tensors((1, 64, 2, 8), (1, 64, 2, 8))
    v = torch.ones(1, 64, 2, 8)
    out = flash.flash_attn_func(q, k, v, dropout_p=0.5)
    assert out.std() > 0.05
    assert abs(out.mean() - 1) < 0.1


def test_the_denominators(flash):
    q, k, v = tensors((2, 5, 4, 8), (2, 3, 4, 8), (2, 3, 4, 8))
    out, lse, weights = flash.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse.shape, lse.dtype, weights.numel()) == ((2, 4, 5), torch.float32, 0)
    assert lse[:, :, :2].eq(float("inf")).all()
    last = torch.einsum("bhd,bkhd->bhk", q[:, -1], k) / math.sqrt(8)
    torch.testing.assert_close(lse[:, :, -1], last.logsumexp(-1))
    torch.testing.assert_close(out, flash.flash_attn_func(q, k, v, causal=True))
    lengths = (torch.tensor([0, 5]), torch.tensor([0, 3]), 5, 3)
    one = (x[0] for x in (q, k, v))
    _, flat, _ = flash.flash_attn_varlen_func(*one, *lengths, causal=True, return_attn_probs=True)
    torch.testing.assert_close(flat, lse[0])


def test_a_cache_grows_in_place(flash):
    q, k, v = tensors((2, 2, 4, 8), (2, 2, 2, 8), (2, 2, 2, 8))
    caches = [torch.randn(2, 8, 2, 8) for _ in range(2)]
    before, lengths = [c.clone() for c in caches], torch.tensor([3, 5], dtype=torch.int32)
    with torch.no_grad():
        out = flash.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, causal=True)
    for b, n in enumerate(lengths.tolist()):
        for cache, old, new in zip(caches, before, (k, v), strict=True):
            assert cache[b, n : n + 2].equal(new[b])
            assert cache[b, :n].equal(old[b, :n])
        close(out[b], naive(q[b], *(c[b, : n + 2] for c in caches), causal=True))


MASK = torch.tensor([[1, 1, 1, 0, 0], [0, 1, 1, 1, 1]], dtype=torch.bool)


def unpadded_attention(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """As transformers and InternVL write it."""
    from flash_attn import flash_attn_varlen_qkvpacked_func
    from flash_attn.bert_padding import pad_input, unpad_input

    rows, indices, starts, longest, used = unpad_input(x, mask)
    assert used.shape == (2,)
    out = flash_attn_varlen_qkvpacked_func(rows, starts, longest, causal=True)
    return pad_input(out, indices, *mask.shape)


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("kernel", ["full", "blockwise", "splash"])
def test_padding_is_taken_out_and_put_back_in_one_program(kernel: str):
    (x,) = tensors((2, 5, 3, 4, 8))
    with tpuport.attention_options(**KERNELS.get(kernel, {"kernel": kernel})):
        check_unpadded(x, tpuport.convert(Call(unpadded_attention)), kernel)


def check_gradient(x: torch.Tensor, ported: Any, mask: torch.Tensor) -> None:
    own = x.detach().requires_grad_()
    weight = torch.randn(2, 5, 4, 8)
    for b in range(2):
        (naive(*own[b, mask[b]].unbind(1), causal=True) * weight[b, mask[b]]).sum().backward()

    @jax.jit
    def gradient(given: jax.Array, kept: jax.Array) -> jax.Array:
        def loss(value: jax.Array) -> jax.Array:
            out, _ = ported.apply(ported.params, ported.buffers, None, value, kept)
            return (out * weight.numpy()).sum()

        return jax.grad(loss)(given)

    close(torch.from_numpy(np.array(gradient(x.detach().numpy(), mask.numpy()))), own.grad.double())


def check_unpadded(x: torch.Tensor, ported: Any, kernel: str) -> None:
    for mask in (MASK, torch.ones(2, 5, dtype=torch.bool), MASK.flip(0, 1)):
        want = torch.zeros(2, 5, 4, 8, dtype=torch.float64)
        for b in range(2):
            want[b, mask[b]] = naive(*x[b, mask[b]].unbind(1), causal=True).detach()
        close(unpadded_attention(x, mask), want)
        with torch.no_grad():
            close(tpuport.to_torch(ported(x.detach(), mask)), want)
        check_gradient(x, ported, mask)
    assert ported.report.retraces == []
    assert {call.kernel for call in ported.report.attention} == {kernel}


def test_the_version_that_is_asked_for():
    with tpuport.porting(flash_attn={"version": "2.3.6"}):
        import flash_attn
        from flash_attn.bert_padding import unpad_input

        assert flash_attn.__version__ == importlib.metadata.version("flash-attn") == "2.3.6"
        assert len(unpad_input(torch.randn(2, 5, 8), MASK)) == 4


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(flash, interleaved):
    del flash
    from flash_attn.layers.rotary import apply_rotary_emb

    (x,) = tensors((2, 5, 3, 10))
    angle = torch.rand(9, 4)
    out = apply_rotary_emb(x, angle.cos(), angle.sin(), interleaved, seqlen_offsets=2)
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + 4) for i in range(4)]
    turned = x.detach().clone()
    for i, (a, b) in enumerate(pairs):
        number = torch.complex(x[..., a], x[..., b])
        number = number * torch.exp(1j * angle[2:7, i])[:, None]
        turned[..., a], turned[..., b] = number.real.detach(), number.imag.detach()
    close(out, turned.double())
    starts = torch.tensor([0, 5, 10])
    flat = x.detach().flatten(0, 1)
    same = apply_rotary_emb(
        flat, angle.cos(), angle.sin(), interleaved, True, 2, cu_seqlens=starts, max_seqlen=5
    )
    torch.testing.assert_close(same.view(2, 5, 3, 10), out)
    assert same is flat


@pytest.mark.parametrize("grouped", [False, True])
def test_rotary_in_place(flash, grouped):
    """Against `apply_rotary_emb` on each part, values and gradients."""
    del flash
    from flash_attn.layers.rotary import (
        apply_rotary_emb,
        apply_rotary_emb_kv_,
        apply_rotary_emb_qkv_,
    )

    class Rotated(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x, angle):
            tables = angle.cos(), angle.sin(), angle.sin(), angle.cos()
            qkv = x * self.factor
            options = {"num_heads_q": 2} if grouped else {}
            same = apply_rotary_emb_qkv_(qkv, *tables, seqlen_offsets=1, **options) is qkv
            kv = x[:, :, :2] * 3
            kv = kv[..., None, :] if grouped else kv
            return qkv, apply_rotary_emb_kv_(kv, *tables[:2], interleaved=True), torch.tensor(same)

    (x,) = tensors((2, 5, 4, 8) if grouped else (2, 5, 3, 2, 8))
    angle = torch.rand(9, 3)
    q, k, v = (x * 2).split([2, 1, 1], 2) if grouped else (x * 2).unbind(2)
    q = apply_rotary_emb(q, angle.cos(), angle.sin(), seqlen_offsets=1)
    k = apply_rotary_emb(k, angle.sin(), angle.cos(), seqlen_offsets=1)
    want = torch.cat([q, k, v], 2) if grouped else torch.stack([q, k, v], 2)
    keys, values = x[:, :, 0] * 3, x[:, :, 1] * 3
    if grouped:
        keys, values = keys[..., None, :], values[..., None, :]
    keys = apply_rotary_emb(keys, angle.cos(), angle.sin(), interleaved=True)
    wanted = (want, torch.stack([keys, values], 2))
    weights = [torch.randn_like(one) for one in wanted]

    def gradient(outs):
        loss = sum((one.cpu() * w).sum() for one, w in zip(outs, weights, strict=True))
        return torch.autograd.grad(loss, x)[0].cpu()

    expected = gradient(wanted)
    for device in ("cpu", "cuda"):  # beside a program, and in one
        *found, same = Rotated().to(device)(x.to(device), angle.to(device))
        assert same.item()
        torch.testing.assert_close([one.cpu() for one in found], list(wanted))
        torch.testing.assert_close(gradient(found), expected)
    with pytest.raises(UsageError, match="num_heads_q"):
        apply_rotary_emb_qkv_(x.detach().flatten(2, -2), angle.cos(), angle.sin())


def test_norms(flash):
    del flash
    from flash_attn.ops.layer_norm import layer_norm
    from flash_attn.ops.rms_norm import RMSNorm

    x, weight, bias = tensors((2, 5), (5,), (5,), dtype=torch.bfloat16)
    wide = x.detach().double()
    norm = RMSNorm(5, eps=1e-6)
    torch.nn.init.uniform_(norm.weight)
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight.detach()
    close(norm(x), want, torch.bfloat16)
    centred = wide - wide.mean(-1, keepdim=True)
    want = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    close(layer_norm(x, weight, bias, 1e-5), want * weight + bias, torch.bfloat16)


def test_flash_attention_3(flash):
    del flash
    import flash_attn_interface as three

    q, k, v = tensors((2, 4, 4, 8), (2, 7, 2, 8), (2, 7, 2, 12))
    want = torch.stack([naive(q[b], k[b], v[b], causal=True) for b in range(2)])
    close(three.flash_attn_func(q, k, v, causal=True, num_splits=1), want)
    rows = (x.flatten(0, 1) for x in (q, k, v))
    starts = (torch.tensor([0, 4, 8]), torch.tensor([0, 7, 14]), 4, 7)
    used = torch.tensor([7, 3])
    out = three.flash_attn_varlen_func(*rows, *starts, seqused_k=used, causal=True)
    close(out[:4], want[0])
    close(out[4:], naive(q[1], k[1, :3], v[1, :3], causal=True))
    with pytest.raises(UsageError, match="qv is not provided"):
        three.flash_attn_func(q, k, v, qv=q)


def test_flash_attention_3_gives_the_pair_that_its_caller_takes_apart(flash):
    del flash
    import flash_attn_interface as three

    q, k, v = tensors((2, 4, 4, 8), (2, 7, 4, 8), (2, 7, 4, 8))
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    starts = (torch.tensor([0, 4, 8]), torch.tensor([0, 7, 14]), 4, 7)
    want = torch.stack([naive(q[b], k[b], v[b]) for b in range(2)])

    def first(*rows):
        return three.flash_attn_varlen_func(*rows, *starts)[0].unflatten(0, (2, 4)).view(2, 4, 32)

    def both(*rows):
        out, lse, *_ = three.flash_attn_varlen_func(*rows, *starts)
        return out.unflatten(0, (2, 4)), lse

    def dense(q, k, v):
        return three.flash_attn_func(q, k, v)[0], three.flash_attn_func(q, k, v).view(2, 4, 32)

    lse = torch.einsum("blhd,bshd->bhls", q, k).div(math.sqrt(8)).logsumexp(-1)
    for call in (lambda f: f, tpuport.convert):
        close(tpuport.to_torch(call(first)(*rows)), want.flatten(2))
        out, found = tpuport.to_torch(call(both)(*rows))
        close(out, want)
        torch.testing.assert_close(found, lse.transpose(0, 1).flatten(1))
        out, flat = tpuport.to_torch(call(dense)(q, k, v))
        close(out, want)
        close(flat, want.flatten(2))
    with tpuport.porting(flash_attn_interface={"returns_lse": True}):
        kept = three.flash_attn_func(q, k, v)
        assert isinstance(kept, tuple)
        assert len(kept) == 2


def test_what_is_refused(flash):
    q, k = tensors((1, 3, 4, 8), (1, 3, 3, 8))
    with pytest.raises(UsageError, match="4 heads over 3 heads"):
        flash.flash_attn_func(q, k, k)
    with pytest.raises(UsageError, match=r"float32 queries over torch\.bfloat16 keys"):
        flash.flash_attn_func(q, q.bfloat16(), q)
    with pytest.raises(UsageError, match="dropped weights"):
        flash.flash_attn_func(q, q, q, dropout_p=0.1, return_attn_probs=True)
    with pytest.raises(UsageError, match="block_table"):
        flash.flash_attn_with_kvcache(q, q, q, block_table=q)
    with pytest.raises(UsageError, match="rotary_cos is not provided"):
        flash.flash_attn_with_kvcache(q, q, q, rotary_cos=q)


def test_the_functions_work_after_the_block_and_the_package_is_gone():
    with tpuport.porting():
        from flash_attn import flash_attn_func
    assert not [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]
    with pytest.raises(ImportError):
        import flash_attn  # noqa: F401
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")
    (q,) = tensors((1, 3, 2, 8))
    close(flash_attn_func(q, q, q)[0], naive(q[0], q[0], q[0]))


RULES: list[dict[str, Any]] = [
    {},
    {"causal": True, "softcap": 2.0},
    {"window": (1, 1), "slopes": True},
    {"causal": True, "scale": 0.3},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_operators_below_the_functions(rule: dict[str, Any]):
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 5, 4, 8), torch.randn(2, 4, 2, 8), torch.randn(2, 4, 2, 8)
    given = torch.randn(2, 5, 4, 8)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.2]) if rule.get("slopes") else None
    causal, window = rule.get("causal", False), rule.get("window", (-1, -1))
    cap = rule.get("softcap", 0.0)
    options = (rule.get("scale", 8**-0.5), causal, *window, cap, slopes)

    def both(q, k, v, given):
        with tpuport.porting():
            from flash_attn.flash_attn_interface import (
                _wrapped_flash_attn_backward,
                _wrapped_flash_attn_forward,
            )
        out, lse, _, state = _wrapped_flash_attn_forward(q, k, v, 0.0, *options, False)
        made = [torch.empty_like(x) for x in (q, k, v)]
        tail = (0.0, *options, False, state)
        total = _wrapped_flash_attn_backward(given, q, k, v, out, lse, *made, *tail)
        # Part by part, as ring attention: with the denominators and results of all keys.
        parts = [torch.empty_like(x) for x in (q, k[:, 2:], v[:, 2:])]
        some = (q, k[:, 2:].contiguous(), v[:, 2:].contiguous())
        _wrapped_flash_attn_backward(given, *some, out, lse, *parts, *tail)
        return out, lse, total, *made, *parts

    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    rows = [
        naive(*(x[i] for x in leaves), softcap=cap, causal=causal, window=window, slopes=slopes,
              scale=rule.get("scale"))
        for i in range(2)
    ]  # fmt: skip
    want = torch.stack(rows)
    gradients = torch.autograd.grad(want, leaves, given.double())
    ported = tpuport.convert(both, verify=False)
    for found in (both(q, k, v, given), tuple(map(tpuport.to_torch, ported(q, k, v, given)))):
        close(found[0], want.detach())
        close(found[2], (want * given).sum(-1).transpose(1, 2).detach())
        for ours, theirs in zip(found[3:6], gradients, strict=True):
            close(ours, theirs)
        for ours, theirs in zip(found[7:], gradients[1:], strict=True):
            close(ours, theirs[:, 2:])


def test_an_operator_with_dropout_is_refused():
    with tpuport.porting():
        from flash_attn.flash_attn_interface import _flash_attn_forward
    x = torch.randn(1, 2, 1, 8)
    with pytest.raises(UsageError, match="dropout_p to 0"):
        _flash_attn_forward(x, x, x, 0.1, None, False)
