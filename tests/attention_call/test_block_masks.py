"""FlexAttention's BlockMask: lists of blocks that data decides, in programs and eager.

The reference has the pairs written out, because eager PyTorch ignores lists where `flex_attention`
is not compiled, and its compiled form has no gradients on a CPU.
"""

from typing import Any

import jax
import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import tpuport
from tests.attention_call.programs import SMALL, gradient_program, kernels, of_scores_size
from tpuport.tracing.attention import block_masks

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings(
        "ignore::tpuport.kernels.attention.dispatch.AttentionWarning",
    ),
]
LENGTH = 384
# A softmax by tiles adds in another order than one over all keys, in float32.
TILED: dict[str, float] = {"rtol": 1e-4, "atol": 1e-5}
# Gradients are sums over 384 queries of that.
SUMMED: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4}
# Without a choice, on a CPU, the scores are a matrix; with this one, kernels run interpreted.
KERNELS: dict[str, Any] = {"interpret": True}


def listed(seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts and indices of a matrix of blocks, as routing code computes them."""
    order = torch.argsort(seen.int(), dim=-1, descending=True, stable=True)
    return seen.sum(-1).to(torch.int32), order.to(torch.int32)


class Routed(nn.Module):
    """Attends to blocks that its inputs name: some whole, some by a mask of documents."""

    def __init__(self, size: int = 128, heads: tuple[int, int] = (2, 1)):
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def made(heads: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(1, heads, LENGTH, 16, generator=generator))

        self.q, self.k, self.v = made(heads[0]), made(heads[1]), made(heads[1])
        self.size = size

    def block_mask(self, full: torch.Tensor, partial: torch.Tensor, ids: Any) -> BlockMask:
        def same(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> torch.Tensor:
            return ids[b, q_idx] == ids[b, kv_idx]

        mask_mod = None if ids is None else same
        return BlockMask.from_kv_blocks(
            *(*listed(partial), *listed(full)), BLOCK_SIZE=self.size, mask_mod=mask_mod
        )

    def forward(self, full: torch.Tensor, partial: torch.Tensor, ids: Any = None) -> Any:
        mask = self.block_mask(full, partial, ids)
        return flex_attention(
            *(self.q, self.k, self.v), block_mask=mask, enable_gqa=True, return_lse=True
        )


def inputs(seed: int, size: int = 128) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random blocks, of which no row is empty but the second of the first head, and ids."""
    generator = torch.Generator().manual_seed(seed)
    count = LENGTH // size
    kinds = torch.randint(0, 3, (1, 2, count, count), generator=generator)
    kinds[..., 0] = 1
    kinds[0, 0, 1] = 0
    ids = torch.randint(0, 3, (1, LENGTH), generator=generator)
    return kinds == 1, kinds == 2, ids


def written_out(net: Routed, full: Any, partial: Any, ids: Any = None) -> Any:
    """The same by the pairs that are seen."""

    def pairs(blocks: Any) -> Any:
        return blocks.repeat_interleave(net.size, 2).repeat_interleave(net.size, 3)

    same = True if ids is None else (ids[:, None, :, None] == ids[:, None, None, :])
    seen = pairs(full) | (pairs(partial) & same)
    share = net.q.shape[1] // net.k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (net.k, net.v))
    scores = torch.where(seen, net.q @ k.mT / 4, -torch.inf)
    return scaled_dot_product_attention(net.q, k, v, attn_mask=seen), scores.logsumexp(-1)


@pytest.mark.parametrize("masked", [True, False], ids=["a mask within", "whole blocks"])
def test_the_kernel_equals_the_pairs_written_out(masked: bool):
    net = Routed()
    with tpuport.attention_options(**KERNELS):
        ported = tpuport.convert(net, verify=False)
        for seed in (1, 2):
            given = inputs(seed)[: 3 if masked else 2]
            for got, want in zip(ported(*given), written_out(net, *given), strict=True):
                torch.testing.assert_close(tpuport.to_torch(got), want, **TILED)
    assert ported.report.retraces == []
    (one,) = ported.report.attention
    words = "listed blocks, and a mask within some" if masked else "listed blocks"
    assert (one.kernel, one.mask) == ("block-sparse", words)


def test_its_gradients_equal_those_of_the_pairs():
    net, given = Routed(), inputs(3)

    def total(outputs: Any) -> Any:
        out, lse = outputs
        return (out * out).sum() + jax.numpy.where(jax.numpy.isneginf(lse), 0, lse).sum()

    with tpuport.attention_options(**KERNELS):
        ported = tpuport.convert(net, verify=False)
        ported(*given)

        @jax.jit
        def derive(params: Any, *args: Any) -> Any:
            def loss(params: Any) -> Any:
                return total(ported.apply(params, ported.buffers, jax.random.key(0), *args)[0])

            return jax.grad(loss)(params)

        found = derive(ported.params, *(jax.numpy.asarray(x.numpy()) for x in given))
        program = gradient_program(ported, total, *given)
    out, lse = written_out(net, *given)
    loss = (out * out).sum() + torch.where(lse.isneginf(), 0, lse).sum()
    loss.backward()
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(
            torch.from_numpy(jax.device_get(found[name]).copy()),
            torch.nan_to_num(parameter.grad),
            **SUMMED,
        )
    assert kernels(program) == 3
    assert all(shape[:2] != (1, 2) for shape in of_scores_size(program, LENGTH))


@pytest.mark.parametrize("size", [128, 64])
@pytest.mark.parametrize("options", [None, {"kernel": "blockwise", "blocks": SMALL}])
def test_lists_count_without_the_kernel(size: int, options: Any):
    """As where PyTorch compiles the call, on any platform and for any size of blocks."""
    net, given = Routed(size, (2, 2)), inputs(4, size)
    want = written_out(net, *given)
    chosen: dict[str, Any] = options or {"kernel": "full"}
    with tpuport.attention_options(**chosen):
        ported = tpuport.convert(net, verify=False)
        for one, other in zip(ported(*given), want, strict=True):
            torch.testing.assert_close(tpuport.to_torch(one), other, **TILED)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("ported", [True, False])
def test_lists_count_under_porting(ported: bool, trained: bool):
    given = inputs(5)
    want = Routed()
    with tpuport.porting(port_modules=ported), torch.set_grad_enabled(trained):
        net = Routed().cuda()
        out, _ = net(*(x.cuda() for x in given))
        if trained:
            (out * out).sum().backward()
    expected, _ = written_out(want, *given)
    torch.testing.assert_close(out.detach().cpu(), expected.detach(), **TILED)
    if trained:
        (expected * expected).sum().backward()
        for one, other in zip(net.parameters(), want.parameters(), strict=True):
            assert one.grad is not None
            torch.testing.assert_close(one.grad.cpu(), other.grad, **SUMMED)


class Made(nn.Module):
    """Makes its BlockMask of a mask of documents, as packed training does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, q: torch.Tensor, ids: torch.Tensor) -> Any:
        def shown(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
            same = ids[b, i] == ids[b, j]
            return same if self.kind == "documents" else same | ((i * j) % 7 == 3)

        mask = create_block_mask(shown, 1, None, q.shape[2], q.shape[2], device=q.device)
        if self.kind == "replaced":
            mask.mask_mod = flex.noop_mask
        return flex_attention(q, q * 2, q + 1, block_mask=mask)


@pytest.mark.parametrize(
    ("kind", "kernel"),
    [("documents", "splash"), ("any", "block-sparse"), ("replaced", "block-sparse")],
)
def test_a_mask_that_splash_knows_stays_with_it(kind: str, kernel: str):
    q, ids = torch.randn(1, 2, LENGTH, 16), (torch.arange(LENGTH) // 150)[None]
    net = Made(kind)
    with tpuport.attention_options(**KERNELS):
        ported = tpuport.convert(net, verify=False)
        got = tpuport.to_torch(ported(q, ids))
    (one,) = ported.report.attention
    assert one.kernel == kernel
    if kind == "replaced":
        at = torch.arange(LENGTH)
        same = (ids[0][:, None] == ids[0]) | (torch.outer(at, at) % 7 == 3)
        blocks = same.view(3, 128, 3, 128).any(3).any(1)
        seen = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
        want = scaled_dot_product_attention(q, q * 2, q + 1, attn_mask=seen)
    else:
        want = net(q, ids)
    torch.testing.assert_close(got, want, **TILED)


def causal(b: Any, h: Any, i: Any, j: Any) -> torch.Tensor:
    return i >= j


def test_known_lists_are_compared_with_their_mask(monkeypatch: pytest.MonkeyPatch):
    mask = create_block_mask(causal, None, None, 300, 300, device="cpu", BLOCK_SIZE=64)
    assert not block_masks.says_more(mask)
    assert not block_masks.says_more(None)
    mask.kv_num_blocks[..., 2] = 0
    assert block_masks.says_more(mask)
    monkeypatch.setattr(block_masks, "_MOST_COMPARED", 10)
    assert block_masks.says_more(create_block_mask(causal, None, None, 300, 300, device="cpu"))


def test_a_block_mask_of_the_outside_is_as_before():
    mask = create_block_mask(causal, None, None, LENGTH, LENGTH, device="cpu")
    q = torch.randn(1, 2, LENGTH, 16)

    def call(q: torch.Tensor) -> Any:
        return flex_attention(q, q * 2, q + 1, block_mask=mask)

    with tpuport.attention_options(**KERNELS):
        ported = tpuport.convert(call)
        got = tpuport.to_torch(ported(q))
    torch.testing.assert_close(got, call(q), **TILED)
    (one,) = ported.report.attention
    assert (one.kernel, one.mask) == ("splash", "causal")
