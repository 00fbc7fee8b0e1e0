"""Two patterns of real models: tokens put in order by masks, and features written into a text."""

import pytest
import torch

from tpuport.rules._apply import find, rewrite
from tpuport.source.rewrite.finding import Severity
from tpuport.testing import equivalence

# Of torchax: how it copies from the host, and that it has no 64-bit integers.
pytestmark = pytest.mark.filterwarnings(
    "ignore:The given NumPy array is not writable", "ignore:Explicitly requested dtype int64"
)

# HunyuanVideo puts the real tokens of two texts first, and the padding of both after them.
ORDER = """
import torch


class Text(torch.nn.Module):
    def order(self, glyphs, words, glyph_mask, word_mask, blank=False):
        texts, masks = [], []
        for i in range(word_mask.shape[0]):
            first, second = glyph_mask[i].bool(), word_mask[i].bool()
            g = glyphs[i]
            w = words[i]
            rest = torch.zeros_like(g[~first])
            if blank:
                tokens = torch.cat([g[first], w[second], rest, torch.zeros_like(w[~second])])
            else:
                tokens = torch.cat([g[first], w[second], g[~first], w[~second]], dim=0)
            real = torch.cat([first[first], second[second], first[~first], second[~second]], dim=0)
            texts.append(tokens)
            masks.append(real)
        return torch.stack(texts), torch.stack(masks).to(torch.int64)

    def forward(self, glyphs: torch.Tensor, words: torch.Tensor, flags: torch.Tensor):
        text, mask = self.order(glyphs, words, flags[:, :3] > 0, flags[:, 3:] > 0)
        blank, _ = self.order(glyphs, words, flags[:, :3] > 0, flags[:, 3:] > 0, blank=True)
        return text, blank, text * mask[..., None]


def forward(glyphs: torch.Tensor, words: torch.Tensor, flags: torch.Tensor):
    return Text()(glyphs, words, flags)
"""

# InternVL writes the features of images over the places that the text keeps for them. Where their
# number is not that of the places, the sample does not count.
WRITE = """
import torch


def forward(
    embeds: torch.Tensor, features: torch.Tensor, flags: torch.LongTensor, ids: torch.LongTensor
):
    features = features[flags == 1]
    B, N, C = embeds.shape
    embeds = embeds.reshape(B * N, C).clone()
    selected = ids.reshape(B * N) == 9
    try:
        embeds[selected] = embeds[selected] * 0.0 + features.reshape(-1, C)
        weight = 1.0
    except Exception as error:
        features = features.reshape(-1, C)
        print(f"{error}: {features.shape}")
        count = selected.sum()
        embeds[selected] = embeds[selected] * 0.0 + features[:count]
        weight = 0.0
    return embeds, (embeds.reshape(B, N, C) * weight).sum()
"""


def load_both(source: str, folder):
    result = rewrite(source)
    assert rewrite(result.source).source == result.source
    return equivalence.load(source, folder), equivalence.load(result.source, folder), result


def test_tokens_in_the_order_of_their_masks(tmp_path):
    before, after, result = load_both(ORDER, tmp_path)
    assert [left for left in result.left if left.finding.severity is not Severity.NOTE] == []
    inputs = equivalence.make_inputs(
        "(torch.randn(2, 3, 2), torch.randn(2, 4, 2), torch.randn(2, 7))", seeds=4
    )
    equivalence.check_eager(before, after, inputs)
    for args in inputs:
        got = equivalence.plain_jit(after, args)
        assert equivalence.difference(before(*args), got) is None


def text_and_features(flags: list[int], places: int):
    ids = torch.randint(0, 9, (2, 5))
    ids.view(-1)[2 : 2 + places] = 9
    return torch.randn(2, 5, 3), torch.randn(3, 2, 3), torch.tensor(flags), ids


@pytest.mark.parametrize(("flags", "places"), [([1, 1, 1], 6), ([1, 0, 1], 4), ([0, 0, 1], 2)])
def test_features_written_over_their_places(flags: list[int], places: int, tmp_path):
    before, after, result = load_both(WRITE, tmp_path)
    assert "weight = tpuport.ops.mismatched(embeds, selected, weight, 0.0)" in result.source
    args = text_and_features(flags, places)
    expected = equivalence.observe(before, args)
    assert equivalence.compare(expected, equivalence.observe(after, args)) is None
    got = equivalence.plain_jit(after, args)
    assert equivalence.difference(expected.value, got, rtol=1e-6) is None


@pytest.mark.parametrize(("flags", "places"), [([1, 1, 1], 4), ([1, 1, 1], 1), ([1, 1, 0], 3)])
def test_features_that_are_too_many_do_not_count(flags: list[int], places: int, tmp_path):
    before, after, _ = load_both(WRITE, tmp_path)
    args = text_and_features(flags, places)
    expected = equivalence.observe(before, args)
    assert expected.error is None
    assert expected.printed
    assert equivalence.compare(expected, equivalence.observe(after, args)) is None
    embeds, total = equivalence.plain_jit(after, args)
    torch.testing.assert_close(embeds, expected.value[0])
    assert float(total) == 0.0 == float(expected.value[1])


def test_features_that_are_too_few_raise_in_eager_and_are_nan_in_a_program(tmp_path):
    before, after, _ = load_both(WRITE, tmp_path)
    args = text_and_features([0, 1, 1], 5)
    for function in (before, after):
        assert equivalence.observe(function, args).error is not None
    assert equivalence.plain_jit(after, args)[1].isnan()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("features[:count]", "features[count:]"),
        ("features[:count]", "2 * features[:count]"),
        ("count = selected.sum()", "count = flags.sum()"),
        ('print(f"{error}: {features.shape}")', "embeds = embeds + 1"),
        ("except Exception as error", "except KeyError as error"),
        ("        weight = 0.0\n", ""),
        ("weight = 1.0", "weight = float(embeds.shape[0])"),
        ("        weight = 0.0\n", "        weight = 0.0\n    finally:\n        flags = None\n"),
    ],
)
def test_a_handler_that_does_something_else_stays(old: str, new: str):
    assert old in WRITE
    result = rewrite(WRITE.replace(old, new))
    assert any("an except clause may handle" in left.reason for left in result.left)
    assert "cut=True" not in result.source


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FlashAttention2", Severity.NOTE),
        ("LlamaFlashAttn", Severity.NOTE),
        ("MiMoV2FlashExperts", Severity.ERROR),
        ("Experts", Severity.ERROR),
    ],
)
def test_a_class_packs_for_kernels_if_it_is_flash_attention(name: str, expected: Severity):
    source = f"""
import torch


class {name}(torch.nn.Module):
    def forward(self, x: torch.Tensor):
        return x[x > 0], x.nonzero()
"""
    assert [finding.severity for finding in find(source)] == [expected, expected]
