"""Masks as user code builds them: attention gets their structure, and no array of the scores' size.

Contents:
    MASKS     key padding, outer products, causal, windows, segments, additive masks, pieces joined;
              each with the structure that is read from it
    BIASES    numbers added to the scores, with gradients into what they are made of
    others    what has no short form, flex attention, packed sequences, options, records
"""

import importlib
import re
import warnings
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

import tpuport
from tests.attention_call.programs import KERNELS, kernels, of_scores_size, program
from tpuport.foundation.errors import UsageError
from tpuport.kernels.attention import dispatch
from tpuport.kernels.attention.dispatch import AttentionWarning

pytestmark = pytest.mark.filterwarnings(
    "ignore::tpuport.kernels.attention.dispatch.AttentionWarning"
)

B, H, S, D = 2, 2, 40, 8
INF = float("-inf")
LOWEST = torch.finfo(torch.float32).min
VALID = torch.ones(B, S, dtype=torch.bool)
VALID[1, :6] = False
IDS = (torch.arange(S) // 9)[None].repeat(B, 1)
IDS[1] = torch.arange(S) // 14
TRIL = torch.ones(S, S, dtype=torch.bool).tril


def _at(rows: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(S) if rows is None else rows
    return at[:, None], at[None, :]


def _repeated(m: torch.Tensor) -> torch.Tensor:
    """As diffusers' HunyuanVideo15 builds it."""
    rows = m.view(B, 1, 1, S).repeat(1, 1, S, 1)
    return (rows & rows.transpose(2, 3)).bool()


def _written(m: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(B, 1, S, S, dtype=torch.bool)
    mask[:, :, 4:, 4:] = m[:, None, 4:, None] & m[:, None, None, 4:]
    return mask


def _window(before: int, after: int) -> torch.Tensor:
    q, k = _at()
    return (k - q >= -before) & (k - q <= after)


# What makes a mask of (valid [B, S], ids [B, S]), and what it is read as.
MASKS: dict[str, tuple[Any, str]] = {
    "keys": (lambda m, s: m[:, None, None, :], "padded keys"),
    "outer": (lambda m, s: m[:, None, :, None] & m[:, None, None], "padded keys, padded queries"),
    "repeated": (lambda m, s: _repeated(m), "padded keys, padded queries"),
    "outer of integers": (
        lambda m, s: (m.long()[:, None, :, None] * m.long()[:, None, None, :]).bool(),
        "padded keys, padded queries",
    ),
    "merged heads": (
        lambda m, s: (
            (m[:, None, :, None] & m[:, None, None, :])
            .expand(B, H, S, S).reshape(B * H, S, S).view(B, H, S, S)
        ),
        "padded keys, padded queries",
    ),
    "causal": (lambda m, s: TRIL() & m[:, None, None, :], "causal, padded keys"),
    "causal by comparison": (
        lambda m, s: (torch.arange(S)[:, None] >= torch.arange(S)) & m[:, None, None, :],
        "causal, padded keys",
    ),
    "shifted": (lambda m, s: TRIL(3) & m[:, None, None, :], "causal, shifted by 3, padded keys"),
    "window": (lambda m, s: _window(4, 0) & m[:, None, None, :], "window -4 to 0, padded keys"),
    "two-sided": (lambda m, s: _window(4, 7) & m[:, None, None, :], "window -4 to 7, padded keys"),
    "segments": (lambda m, s: s[:, None, :, None] == s[:, None, None, :], "segments"),
    "causal segments": (
        lambda m, s: (s[:, None, :, None] == s[:, None, None, :]) & TRIL() & m[:, None, None, :],
        "causal, segments, padded keys",
    ),
    "chunks on the host": (
        lambda m, s: (IDS[0][:, None] == IDS[0]) & TRIL() & m[:, None, None, :],
        "causal, segments, padded keys",
    ),
    "causal blocks": (
        lambda m, s: s[:, None, :, None] >= s[:, None, None, :],
        "further conditions",
    ),
    "causal blocks on the host": (
        lambda m, s: (IDS[0][:, None] >= IDS[0]) & m[:, None, None, :],
        "padded keys, further conditions",
    ),
    "prefix": (lambda m, s: TRIL() | ~m[:, None, None, :], "further conditions"),
    "-inf": (
        lambda m, s: torch.zeros(B, 1, S, S).masked_fill(~m[:, None, None], INF),
        "padded keys",
    ),
    "-inf sum": (
        lambda m, s: (
            torch.full((S, S), INF).triu(1)
            + torch.zeros(B, 1, 1, S).masked_fill(~m[:, None, None], INF)
        ),
        "causal, padded keys",
    ),
    "-inf where, rounded": (
        lambda m, s: torch.where(m[:, None, None], 0.0, INF).bfloat16().float(),
        "padded keys",
    ),
    "-inf where hidden, rounded": (
        lambda m, s: torch.where(~m[:, None, None], INF, 0.0).bfloat16().float(),
        "padded keys",
    ),
    # As T5 adds a mask to position biases that it does not have, in bfloat16.
    "-inf and zeros, rounded": (
        lambda m, s: (
            torch.zeros(1, H, S, S, dtype=torch.bfloat16)
            + torch.where(m[:, None, None], 0.0, INF).bfloat16()
        ).float(),
        "padded keys",
    ),
    # As nn.MultiheadAttention without weights joins both.
    "-inf sum of merged heads": (
        lambda m, s: (
            torch.full((S, S), INF).triu(1)
            + torch.zeros(B, S).masked_fill(~m, INF)
            .view(B, 1, 1, S).expand(-1, H, -1, -1).reshape(B * H, 1, S)
        ).view(B, H, -1, S),
        "causal, padded keys",
    ),
    "-inf where": (
        lambda m, s: torch.where(m[:, None, None] & m[:, None, :, None], 0.0, INF),
        "padded keys, padded queries",
    ),
    "-inf not or": (
        lambda m, s: (
            torch.zeros(B, 1, S, S).masked_fill(
                torch.logical_not(m[:, None, None]) | torch.ones(S, S).triu(1).bool(), INF
            )
        ),
        "causal, padded keys",
    ),
    # A query that sees nothing sees everything then: no boolean mask says that.
    "lowest": (lambda m, s: (1 - m[:, None, None].float()) * LOWEST, "bias"),
    "joined": (
        lambda m, s: torch.cat(
            [m[:, None, :, None] & m[:, None, None, 5:], torch.ones(B, 1, S, 5).bool()], -1
        ),
        "further conditions",
    ),
    "padded": (
        lambda m, s: F.pad(m[:, None, :, None] & m[:, None, None, 5:], (5, 0), value=True),
        "further conditions",
    ),
    "all": (lambda m, s: torch.ones(S, S, dtype=torch.bool), "none"),
}  # fmt: skip


def _operands(seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(B, H, S, D) for _ in range(3)]


class Attends(torch.nn.Module):
    """Attention with weights before it, so that there are gradients."""

    def __init__(self, make: Any, **options: Any) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([1.0, 0.5, 1.5]))
        self.make, self.options = make, options

    def forward(self, q: Any, k: Any, v: Any, m: torch.Tensor, s: torch.Tensor) -> Any:
        """Attention with the mask that `make` gives."""
        mask = self.make(m, s)
        q, k, v = (x * w for x, w in zip((q, k, v), self.scale, strict=True))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **self.options)


def _checked(
    model: Any, args: tuple[Any, ...], kernel: str, *, gradients: bool = False
) -> tpuport.PortedModel:
    """The port, compared with eager in value, and in gradients if asked for."""
    with tpuport.attention_options(**KERNELS[kernel]):
        ported = tpuport.convert(model, verify=not gradients)
        if gradients:
            ported.verify(*args)
        else:
            ported(*args)
        assert ported.report.ok, ported.report
    return ported


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_read(name: str):
    make, expected = MASKS[name]
    ported = _checked(Attends(make), (*_operands(), VALID, IDS), "blockwise")
    (call,) = ported.report.attention
    assert (call.kernel, call.mask) == ("blockwise", expected)
    assert of_scores_size(program(ported), S) == []


@pytest.mark.parametrize("name", ["repeated", "causal segments", "causal blocks", "lowest"])
def test_gradients_pass_a_mask(name: str):
    args = (*_operands(), VALID, IDS)
    _checked(Attends(MASKS[name][0]), args, "blockwise", gradients=True)


@pytest.mark.parametrize("name", ["repeated", "causal", "two-sided", "causal segments"])
def test_splash_takes_the_structure(name: str):
    make, expected = MASKS[name]
    args = (*_operands(), VALID, IDS)
    ported = _checked(Attends(make), args, "splash", gradients=name == "repeated")
    (call,) = ported.report.attention
    assert (call.kernel, call.mask) == ("splash", expected)
    assert kernels(program(ported)) > 0
    assert of_scores_size(program(ported), S) == []


def test_every_row_without_keys_gives_zeros():
    empty = VALID.clone()
    empty[0] = False
    for kernel in KERNELS:
        for name in ("outer", "-inf where"):
            _checked(Attends(MASKS[name][0]), (*_operands(), empty, IDS), kernel)


class Biased(torch.nn.Module):
    """Attention with a bias that is learned."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = torch.nn.Parameter(torch.randn(32, H))
        self.make = make

    def forward(self, q: Any, k: Any, v: Any, m: torch.Tensor, s: torch.Tensor) -> Any:
        """Attention with the bias that `make` gives."""
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.make(self.table, m, s))


def _buckets() -> torch.Tensor:
    q, k = _at()
    return (k - q).clamp(-15, 16) + 15


BIASES = {
    "T5": lambda t, m, s: t[_buckets()].permute(2, 0, 1)[None],
    "T5, traced": lambda t, m, s: F.embedding(
        (s[0][None] - s[0][:, None]).clamp(-15, 16) + 15, t
    ).permute(2, 0, 1)[None],
    "ALiBi": lambda t, m, s: (
        t[0][None, :, None, None] * (torch.arange(S)[None] - torch.arange(S)[:, None])
        + torch.zeros(B, 1, 1, S).masked_fill(~m[:, None, None], INF)
    ),
    "hidden": lambda t, m, s: torch.where(
        m[:, None, None], t[0][None, :, None, None] * torch.arange(S), INF
    ),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_is_added_in_tiles(name: str):
    args = (*_operands(), VALID, IDS)
    ported = _checked(Biased(BIASES[name]), args, "blockwise", gradients=True)
    (call,) = ported.report.attention
    assert call.kernel == "blockwise"
    assert "bias" in call.mask
    assert "the scores' size" not in call.reason
    assert of_scores_size(program(ported), S) == []


def test_an_image_of_one_row_ends_where_a_number_says():
    """Then whether the row is there is one number against another, for all keys."""

    def seen(m: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
        rows = torch.arange(1) < s[:, 0, None]
        columns = torch.arange(S) < s[:, 1, None]
        return (rows[:, :, None] & columns[:, None]).flatten(1)[:, None, None]

    args = (*(x[:1] for x in _operands()), VALID[:1], torch.tensor([[1, 25]]))
    ported = _checked(Attends(seen), args, "blockwise")
    assert ported.report.attention[0].mask == "padded keys"
    _checked(Attends(seen), (*args[:4], torch.tensor([[0, 25]])), "blockwise")


def test_a_mask_without_a_short_form_is_named():
    model = Attends(lambda m, s: torch.cumsum(m[:, None, :, None] & m[:, None, None], -1) > 3)
    ported = _checked(model, (*_operands(), VALID, IDS), "blockwise")
    assert "needs arrays of the scores' size: int32[2, 1, 40, 40] by cumsum" in (
        ported.report.attention[0].reason
    )


def test_a_mask_is_read_through_a_checkpoint():
    from torch.utils.checkpoint import checkpoint

    class Twice(Attends):
        def forward(self, q: Any, k: Any, v: Any, m: torch.Tensor, s: torch.Tensor) -> Any:
            mask = TRIL() & m[:, None, None] & m[:, None, :, None]

            def block(x: torch.Tensor) -> torch.Tensor:
                return F.scaled_dot_product_attention(x * self.scale[0], k, v, attn_mask=mask)

            for _ in range(2):
                q = checkpoint(block, q, use_reentrant=False)
            return q

    args = (*_operands(), VALID, IDS)
    ported = _checked(Twice(None), args, "blockwise", gradients=True)
    (call,) = ported.report.attention
    assert (call.mask, call.calls) == ("causal, padded keys, padded queries", 2)
    assert of_scores_size(program(ported), S) == []


def test_other_ranks_and_grouped_heads():
    def call(q: Any, k: Any, v: Any, m: torch.Tensor, s: torch.Tensor) -> Any:
        grouped = F.scaled_dot_product_attention(
            q, k[:, :1], v[:, :1], attn_mask=m[:, None, None], enable_gqa=True, scale=0.3
        )
        five = [x[:, None].expand(B, 3, H, S, D) for x in (q, k, v)]
        more = F.scaled_dot_product_attention(*five, attn_mask=m[:, None, None, None])
        return grouped, more, F.scaled_dot_product_attention(q[0], k[0], v[0], is_causal=True)

    ported = _checked(call, (*_operands(), VALID, IDS), "blockwise")
    masks = [(call.mask, call.query) for call in ported.report.attention]
    assert masks == [
        ("padded keys", (B, H, S, D)),
        ("padded keys", (3 * B, H, S, D)),
        ("causal", (1, H, S, D)),
    ]


SCORE_MODS = {
    "hidden": (
        lambda m, t: lambda x, b, h, q, k: torch.where(m[b, q] & m[b, k], x, INF),
        "padded keys, padded queries",
    ),
    "causal ALiBi": (
        lambda m, t: lambda x, b, h, q, k: torch.where(q >= k, x + t[h] * (k - q), INF),
        "causal, bias",
    ),
    "capped": (lambda m, t: lambda x, b, h, q, k: 5.0 * torch.tanh(x / 5.0), "none"),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_flex_attention_is_read(name: str):
    make: Any
    make, expected = SCORE_MODS[name]
    args = (*_operands(), VALID, torch.rand(H))

    def call(q: Any, k: Any, v: Any, m: torch.Tensor, t: torch.Tensor) -> Any:
        return flex_attention(q, k, v, score_mod=make(m, t))

    with tpuport.attention_options(**KERNELS["blockwise"]):
        ported = tpuport.convert(call, verify=False)
        got = ported(*args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it should be compiled
        want = call(*args)
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-4, atol=1e-5)
    assert [one.mask for one in ported.report.attention] == [expected]
    assert of_scores_size(program(ported), S) == []


def test_flex_attention_with_another_function_of_scores_is_computed_as_before():
    q, k, v = _operands()
    with tpuport.attention_options(**KERNELS["blockwise"]):
        ported = tpuport.convert(
            lambda q, k, v: flex_attention(q, k, v, score_mod=lambda x, b, h, i, j: x * x),
            verify=False,
        )
        got = ported(q, k, v)
    want = torch.softmax((q @ k.transpose(-1, -2) * D**-0.5) ** 2, -1) @ v
    np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-4, atol=1e-5)
    assert ported.report.attention == []


def test_packed_causal_sequences_are_segments():
    with tpuport.porting("nothing_of_that_name", flash_attn={}):
        flash_attn_varlen_func = importlib.import_module("flash_attn").flash_attn_varlen_func

        def call(q: Any, k: Any, v: Any, starts: torch.Tensor) -> Any:
            return flash_attn_varlen_func(q, k, v, starts, starts, 20, 20, causal=True)

        q, k, v = (x[0].transpose(0, 1).contiguous() for x in _operands())
        starts = torch.tensor([0, 9, 20, 36], dtype=torch.int32)
        with tpuport.attention_options(**KERNELS["splash"]):
            ported = tpuport.convert(call)
            ported(q, k, v, starts)
        assert ported.report.ok
    (one,) = ported.report.attention
    assert (one.kernel, one.mask) == ("splash", "causal, segments, padded keys, padded queries")
    assert of_scores_size(program(ported), S) == []


def test_a_program_is_compiled_again_for_other_options():
    ported = tpuport.convert(Attends(MASKS["causal"][0]), verify=False)
    args = (*_operands(), VALID, IDS)
    ported(*args)
    assert ported.report.attention == []
    with tpuport.attention_options(**KERNELS["blockwise"]):
        ported(*args)
        ported(*args)
    with tpuport.attention_options("full"):
        ported(*args)
    assert [call.kernel for call in ported.report.attention] == ["full"]
    assert [r.index for r in ported.report.retraces] == [1, 2]
    assert "options of attention" in ported.report.retraces[0].causes[0]


def test_where_a_call_is_made_is_recorded():
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.ModuleList([Attends(MASKS["causal"][0]) for _ in range(3)])

        def forward(self, *args: Any) -> Any:
            return sum(one(*args) for one in self.inner)

    with tpuport.attention_options(**KERNELS["blockwise"]):
        ported = tpuport.convert(Layer(), verify=False)
        ported(*_operands(), VALID, IDS)
    (call,) = ported.report.attention
    assert (call.file, call.module, call.calls) == (__file__, "inner.0", 3)
    assert call.query == call.key == (B, H, S, D)
    text = str(ported.report)
    assert "Attention (1)" in text
    assert "blockwise: queries [2, 2, 40, 8], keys [2, 2, 40, 8], 3 calls" in re.sub(
        r"\s+", " ", text
    )
    assert "sort of attention" in ported.report.to_html()
    again = tpuport.PortReport.from_json(ported.report.to_json())
    assert again.attention == ported.report.attention


def test_a_mesh_is_used_by_the_names_of_its_axes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(dispatch, "_said", set())
    mesh = jax.make_mesh((2, 2, 2), ("data", "tensor", "sequence"))
    from tpuport.tracing.attention.options import shards_for

    shards = shards_for(mesh, (B, H, S))
    assert shards is not None
    assert (shards.batch, shards.heads, shards.sequence) == (("data",), ("tensor",), ("sequence",))
    with pytest.warns(AttentionWarning) as said:
        one = shards_for(mesh, (1, 3, S))
    assert [str(warning.message) for warning in said] == [
        "Attention has batch of 1, which the mesh axis 'data' of 2 does not divide: its chips"
        " compute the same",
        "Attention has heads of 3, which the mesh axis 'tensor' of 2 does not divide: its chips"
        " compute the same",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shards_for(mesh, (1, 3, S)) == one
    assert one is not None
    assert (one.batch, one.heads) == ((), ())
    with tpuport.attention_options(axes={"sequence": ("sequence", "tensor"), "heads": ()}):
        both = shards_for(mesh, (B, H, S))
        assert both is not None
        assert (both.heads, both.sequence) == ((), ("sequence", "tensor"))
    with (
        tpuport.attention_options(axes={"heads": ("model",)}),
        pytest.raises(UsageError, match=r"puts heads over 'model', and the axes of the mesh are"),
    ):
        shards_for(mesh, (B, H, S))


def test_a_spread_model_computes_the_same():
    from tpuport.sharding import make_mesh

    model, args = Attends(MASKS["repeated"][0]), (*_operands(), VALID, IDS)
    want = model(*args)
    for kernel in KERNELS:
        with tpuport.attention_options(**KERNELS[kernel]):
            ported = tpuport.convert(model, verify=False)
            tpuport.shard(ported, make_mesh({"data": 2, "tensor": 2, "sequence": 2}), "replicated")
            got = ported(*args)
        np.testing.assert_allclose(got.numpy(), want.detach().numpy(), rtol=1e-4, atol=1e-5)
        (call,) = ported.report.attention
        assert call.spread == "batch over data, heads over tensor, sequence over sequence"


def test_wrong_options_are_refused():
    with pytest.raises(UsageError, match="There is no kernel 'flash'"):
        tpuport.attention_options(kernel="flash").__enter__()  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"axes names 'head': the dims of attention are 'batch'"):
        tpuport.attention_options(axes={"head": ("tensor",)}).__enter__()
    assert issubclass(AttentionWarning, UserWarning)
