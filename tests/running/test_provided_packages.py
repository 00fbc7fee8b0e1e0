"""xformers, SageAttention and apex as they are provided, against the same thing written down."""

import math

import pytest
import torch

import tpuport
from tpuport.foundation.errors import UsageError


def plain(q, k, v, seen=None, scale=None):
    """[B, M, H, K] over [B, N, H, K] in float64; `seen` [B or 1, H or 1, M, N]."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = torch.einsum("bmhd,bnhd->bhmn", q, k) * (scale or 1 / math.sqrt(q.shape[-1]))
    if seen is not None:
        scores = scores.masked_fill(~seen, -1e300)
    weights = torch.softmax(scores, -1)
    if seen is not None:
        weights = weights * seen.any(-1, keepdim=True)
    return torch.einsum("bhmn,bnhd->bmhd", weights, v)


def compare(function, want, *operands, rtol=2e-5):
    """Value and gradient in eager PyTorch, and the value in a program."""
    out = function(*operands)
    torch.testing.assert_close(out.double(), want, rtol=rtol, atol=rtol)
    cotangent = torch.randn(out.shape)
    ours = torch.autograd.grad((out * cotangent).sum(), operands)
    theirs = torch.autograd.grad((want * cotangent).sum(), operands)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=10 * rtol, atol=10 * rtol)

    class Module(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    assert out.is_contiguous()
    with torch.no_grad():
        ported = tpuport.to_torch(tpuport.convert(Module())(*operands))
    torch.testing.assert_close(ported, out.detach(), rtol=rtol, atol=rtol)


def operands(length=6, keys=6, heads=2, batch=1):
    shapes = ((batch, n, heads, 8) for n in (length, keys, keys))
    return [torch.randn(shape).requires_grad_() for shape in shapes]


@pytest.fixture
def ops():
    with tpuport.porting():
        import xformers.ops as ops

        yield ops


def test_xformers_plain_and_scaled(ops):
    q, k, v = operands(4, 7, batch=2)
    compare(ops.memory_efficient_attention, plain(q, k, v), q, k, v)
    want = plain(q, k, v, scale=0.2)
    compare(lambda *x: ops.memory_efficient_attention(*x, scale=0.2, op=None), want, q, k, v)
    one = ops.memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0])
    torch.testing.assert_close(one, plain(q, k, v)[:, :, 0].float())
    groups = (x.unsqueeze(2) for x in (q, k, v))
    out = ops.memory_efficient_attention(*groups)
    torch.testing.assert_close(out[:, :, 0], plain(q, k, v).float())


def test_xformers_bias_is_added_and_gets_its_gradient(ops):
    q, k, v = operands(4, 7)
    bias = torch.randn(1, 2, 4, 7, requires_grad=True)
    scores = torch.einsum("bmhd,bnhd->bhmn", q.double(), k.double()) / math.sqrt(8) + bias.double()
    want = torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v.double())
    compare(ops.memory_efficient_attention, want, q, k, v, bias)


@pytest.mark.parametrize("sizes", [(6, 6), (4, 7), (7, 4)])
@pytest.mark.parametrize("kind", ["LowerTriangularMask", "LowerTriangularFromBottomRightMask"])
def test_xformers_causal(ops, kind, sizes):
    q, k, v = operands(*sizes)
    shift = 0 if kind == "LowerTriangularMask" else sizes[1] - sizes[0]
    seen = torch.ones(sizes, dtype=torch.bool).tril(shift)
    mask = getattr(ops, kind)()
    compare(lambda *x: ops.memory_efficient_attention(*x, mask), plain(q, k, v, seen), q, k, v)
    assert mask.materialize((1, 2, *sizes)).isinf().logical_not().equal(seen.expand(1, 2, *sizes))


BLOCKS = {
    "make_causal": lambda own, distance: distance <= 0,
    "make_causal_from_bottomright": lambda own, distance: own <= 0,
    "make_local_attention": lambda own, distance: (distance <= 0) & (distance > -2),
    "make_local_attention_from_bottomright": lambda own, distance: (own <= 0) & (own > -2),
    None: lambda own, distance: distance == distance,
}


def block(kind, m, n):
    """Written down: `distance` from the start of both sequences, `own` from their ends."""
    distance = torch.arange(n) - torch.arange(m)[:, None]
    return BLOCKS[kind](distance - (n - m), distance)


@pytest.mark.parametrize("kind", BLOCKS)
def test_xformers_blocks(ops, kind):
    q, k, v = operands(8, 12)
    sizes = [(3, 5), (0, 2), (5, 4 if kind in (None, "make_causal", "make_local_attention") else 5)]
    k, v = (x[:, : sum(n for _, n in sizes)] for x in (k, v))
    mask = ops.fmha.attn_bias.BlockDiagonalMask.from_seqlens(*map(list, zip(*sizes, strict=True)))
    if kind is not None:
        mask = getattr(mask, kind)(*([2] if "local" in kind else []))
    seen = torch.block_diag(*(block(kind, m, n) for m, n in sizes)).bool()
    compare(lambda *x: ops.memory_efficient_attention(*x, mask), plain(q, k, v, seen), q, k, v)
    assert mask.materialize((8, k.shape[1])).isinf().logical_not().equal(seen)
    with pytest.raises(UsageError, match="for 8 queries and"):
        ops.memory_efficient_attention(q[:, 1:], k, v, mask)


def test_xformers_other_masks(ops):
    q, k, v = operands(5, 7)
    distance = torch.arange(7) - torch.arange(5)[:, None] - 2
    band = ops.fmha.attn_bias.LocalAttentionFromBottomRightMask(2, 1)
    seen = (distance >= -2) & (distance <= 1)
    compare(lambda *x: ops.memory_efficient_attention(*x, band), plain(q, k, v, seen), q, k, v)
    local = ops.LowerTriangularFromBottomRightMask().make_local_attention(2)
    seen = (distance > -2) & (distance <= 0)
    compare(lambda *x: ops.memory_efficient_attention(*x, local), plain(q, k, v, seen), q, k, v)
    bias = torch.randn(1, 2, 5, 7)
    scores = torch.einsum("bmhd,bnhd->bhmn", q.double(), k.double()) / math.sqrt(8) + bias.double()
    scores = scores.masked_fill(distance > -2, -math.inf)
    want = torch.einsum("bhmn,bnhd->bmhd", scores.softmax(-1), v.double())
    mask = ops.LowerTriangularMask().add_bias(bias)
    compare(lambda *x: ops.memory_efficient_attention(*x, mask), want, q, k, v)
    padded = ops.fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=[2, 3], kv_padding=4, kv_seqlen=[3, 4]
    )
    q, k, v = operands(5, 8)
    first = torch.nn.functional.pad(block("make_causal_from_bottomright", 2, 3), (0, 1))
    second = block("make_causal_from_bottomright", 3, 4)
    seen = torch.block_diag(first, second).bool()
    compare(lambda *x: ops.memory_efficient_attention(*x, padded), plain(q, k, v, seen), q, k, v)
    with pytest.raises(ValueError, match="num_keys >= num_queries"):
        ops.fmha.BlockDiagonalMask.from_seqlens([3], [2]).make_causal_from_bottomright()


def test_xformers_tensor_lists_come_back(ops):
    tensors = [torch.randn(2, 3, 2, 8), torch.randn(1, 4, 2, 8)]
    mask, rows = ops.fmha.BlockDiagonalMask.from_tensor_list(tensors)
    assert rows.shape == (1, 10, 2, 8)
    assert all(a.equal(b) for a, b in zip(mask.split(rows), tensors, strict=True))
    assert mask.q_seqinfo.seqstart.tolist() == [0, 3, 6, 10]
    assert (mask.q_seqinfo.max_seqlen, mask.q_seqinfo.min_seqlen) == (4, 3)
    with pytest.raises(ValueError, match="expected format"):
        mask.split(rows[:, 1:])


def test_xformers_nested_lists(ops):
    """DINOv2's training on crops of two sizes, as dinov2/layers/block.py has it."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.gamma = torch.nn.Linear(8, 24), torch.nn.Parameter(torch.rand(8))
            self.mlp = ops.SwiGLU(8, 16)

        def forward(self, big, small):
            chosen = [torch.tensor([2, 0]), torch.tensor([1])]
            lengths = [x.shape[1] for x in (big, small) for _ in range(2 if x is big else 1)]
            mask = ops.fmha.BlockDiagonalMask.from_seqlens(lengths)
            mask._batch_sizes = [2, 1]
            rows = ops.index_select_cat([big.flatten(1), small.flatten(1)], chosen)
            rows = rows.view(1, -1, 8)
            q, k, v = ops.unbind(self.qkv(rows).reshape(1, -1, 3, 2, 4), 2)
            out = ops.memory_efficient_attention(q, k, v, attn_bias=mask).view(1, -1, 8)
            outs = []
            for x, index, part in zip((big, small), chosen, mask.split(self.mlp(out)), strict=True):
                x = x * 1.0
                outs.append(ops.scaled_index_add(x, index, part, scaling=self.gamma, alpha=1.5))
            return outs

    class Plain(Block):
        def forward(self, big, small):
            outs = []
            for x, index in ((big, [2, 0]), (small, [1])):
                rows = x[index]
                q, k, v = self.qkv(rows).reshape(*rows.shape[:2], 3, 2, 4).unbind(2)
                out = plain(q, k, v).float().flatten(2)
                first, second = self.mlp.w12(out).chunk(2, -1)
                out = self.mlp.w3(torch.nn.functional.silu(first) * second)
                x = x.clone()
                x[index] += 1.5 * self.gamma * out
                outs.append(x)
            return outs

    block, written = Block(), Plain()
    written.load_state_dict(block.state_dict())
    crops = (torch.randn(3, 5, 8), torch.randn(2, 3, 8))
    ported = tpuport.convert(block)
    for _ in range(2):
        for ours, want, eager in zip(
            tpuport.to_torch(ported(*crops)), written(*crops), block(*crops), strict=True
        ):
            torch.testing.assert_close(ours, want)
            torch.testing.assert_close(eager, want)
    losses = [sum(x.square().mean() for x in model(*crops)) for model in (block, written)]
    for loss in losses:
        loss.backward()
    for (name, ours), want in zip(block.named_parameters(), written.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, want.grad, msg=name)


def test_xformers_refuses_a_mask_that_it_does_not_know(ops):
    q, k, v = operands()
    with pytest.raises(UsageError, match="attn_bias of type dict"):
        ops.memory_efficient_attention(q, k, v, {})
    with pytest.raises(UsageError, match="a query of 2 dims"):
        ops.memory_efficient_attention(q[0, :, 0], k, v)


@pytest.fixture
def sage():
    with tpuport.porting():
        import sageattention

        yield sageattention


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("causal", [False, True])
def test_sageattn(sage, layout, causal):
    q, k, v = operands(batch=2)
    want = plain(q, k, v, torch.ones(6, 6).tril().bool() if causal else None, scale=0.3)

    def call(*x):
        x = x if layout == "NHD" else [y.transpose(1, 2) for y in x]
        out = sage.sageattn(*x, tensor_layout=layout, is_causal=causal, sm_scale=0.3)
        return out if layout == "NHD" else out.transpose(1, 2)

    compare(call, want, q, k, v)


def test_sageattn_varlen(sage):
    q, k, v = (x.detach()[0].requires_grad_() for x in operands(9, 9))
    starts = torch.tensor([0, 3, 9])
    blocks = (torch.ones(n, n).tril() for n in (3, 6))
    want = plain(q[None], k[None], v[None], torch.block_diag(*blocks).bool())[0]
    compare(lambda *x: sage.sageattn_varlen(*x, starts, starts, 6, 6, True), want, q, k, v)


def test_sageattn_denominators_and_refusals(sage):
    q, k, v = (x.transpose(1, 2) for x in operands(4, 7))
    _, lse = sage.sageattn(q, k, v, return_lse=True)
    torch.testing.assert_close(lse, (q @ k.mT / math.sqrt(8)).logsumexp(-1))
    with pytest.raises(UsageError, match="4 queries and 7 keys"):
        sage.sageattn(q, k, v, is_causal=True)
    with pytest.raises(UsageError, match="tensor_layout 'BHLD'"):
        sage.sageattn(q, k, v, tensor_layout="BHLD")


@pytest.fixture
def block_attention():
    with tpuport.porting():
        import flex_block_attn

        yield flex_block_attn.flex_block_attn_func


@pytest.mark.parametrize("options", [{"interpret": True}, {"kernel": "full"}])
@pytest.mark.parametrize("lead", [(), (1, 2), (2, 1)])
def test_blocks_of_keys_that_are_seen(block_attention, lead, options):
    torch.manual_seed(0)
    sizes = (128, 128) if lead else (128, 256)
    q, k, v = (torch.randn(2, 2, 256, 8, requires_grad=True) for _ in range(3))
    seen = torch.rand(*lead, 2, 256 // sizes[1]) < 0.6
    seen[..., 0, :] = False
    seen[..., 1, 0] = True
    pairs = seen.repeat_interleave(sizes[0], -2).repeat_interleave(sizes[1], -1)

    def call(q, k, v, seen):
        return block_attention(q, k, v, *sizes, seen)

    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=pairs)
    with tpuport.attention_options(**options):
        ported = tpuport.convert(call)
        for blocks in (seen, seen.int()):
            torch.testing.assert_close(tpuport.to_torch(ported(q, k, v, blocks)), out)
    kernels = {one.kernel for one in ported.report.attention}
    assert kernels == {"full" if "kernel" in options else "block-sparse"}
    torch.testing.assert_close(call(q, k, v, seen), out)


def test_blocks_that_do_not_fit_are_refused(block_attention):
    q = torch.randn(1, 2, 256, 8)
    with pytest.raises(UsageError, match="q has 256 rows, which blocks of 100"):
        block_attention(q, q, q, 100, 128, torch.ones(2, 2))
    with pytest.raises(UsageError, match=r"expected \(2, 2\)"):
        block_attention(q, q, q, 128, 128, torch.ones(2, 3))
    with pytest.raises(UsageError, match="a batch of 1 or 1"):
        block_attention(q, q, q, 128, 128, torch.ones(3, 1, 2, 2))
    with pytest.raises(UsageError, match="has 5 dims"):
        block_attention(q, q, q, 128, 128, torch.ones(1, 1, 1, 2, 2))


@pytest.fixture
def norms():
    with tpuport.porting():
        import apex.normalization as norms

        yield norms


@pytest.mark.parametrize("name", ["FusedLayerNorm", "MixedFusedLayerNorm"])
@pytest.mark.parametrize("shape", [5, (4, 5)])
def test_apex_layer_norm(norms, name, shape):
    x = torch.randn(3, 4, 5, requires_grad=True)
    norm = getattr(norms, name)(shape, eps=1e-3)
    torch.nn.init.uniform_(norm.weight)
    torch.nn.init.uniform_(norm.bias)
    dims, wide = ((-1,) if shape == 5 else (-2, -1)), x.double()
    centred = wide - wide.mean(dims, keepdim=True)
    want = centred / (centred.square().mean(dims, keepdim=True) + 1e-3).sqrt()
    compare(norm, want * norm.weight.double() + norm.bias.double(), x)


@pytest.mark.parametrize("name", ["FusedRMSNorm", "MixedFusedRMSNorm"])
@pytest.mark.parametrize("shape", [5, (4, 5)])
def test_apex_rms_norm(norms, name, shape):
    x = torch.randn(3, 4, 5, requires_grad=True)
    norm = getattr(norms, name)(shape, eps=1e-3)
    torch.nn.init.uniform_(norm.weight)
    dims, wide = ((-1,) if shape == 5 else (-2, -1)), x.double()
    want = wide / (wide.square().mean(dims, keepdim=True) + 1e-3).sqrt() * norm.weight.double()
    compare(norm, want, x)


def test_apex_dtypes(norms):
    x = torch.randn(3, 5).bfloat16()
    assert norms.FusedLayerNorm(5)(x).dtype == norms.FusedRMSNorm(5)(x).dtype == torch.bfloat16
    assert norms.MixedFusedLayerNorm(5)(x).dtype == torch.float32
    assert norms.MixedFusedRMSNorm(5)(x).dtype == torch.float32
    assert norms.FusedRMSNorm(5, elementwise_affine=False).weight is None
    functions = norms.fused_layer_norm
    assert functions.fused_rms_norm(x, 5).shape == functions.fused_layer_norm(x, 5).shape
    with pytest.raises(UsageError, match="takes its dtype from the weight"):
        norms.MixedFusedRMSNorm(5, elementwise_affine=False)


def test_apex_amp_is_refused():
    with tpuport.porting():
        from apex import amp

        with pytest.raises(UsageError, match=r"apex.amp.initialize .* not provided"):
            amp.initialize(torch.nn.Linear(1, 1))
