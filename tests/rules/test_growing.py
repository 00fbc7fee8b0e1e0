"""Tables that grow in a step: what the fix of TPU412 makes of them, and what has no fix."""

import jax
import pytest
import torch

from tpuport import ops
from tpuport.rules._apply import find
from tpuport.rules.growing_cache import GrowingCache
from tpuport.testing import equivalence
from tpuport.testing.harms import HARMS

GROWING = GrowingCache.EXAMPLES[0]
FIXED = GROWING.after or ""
SHORT, LONG = (torch.randn(3, 5),), (torch.randn(3, 12),)

MEMORY = """\
import torch


class Memory(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = torch.zeros(1, 4)

    def forward(self, x: torch.Tensor):
        self.seen = torch.cat([self.seen.to(x.device), x])
        return x - self.seen.mean(0)


forward = Memory()
"""


def test_the_fixed_table_grows_in_eager_pytorch_and_in_a_port(tmp_path):
    before, after = (equivalence.load(source, tmp_path) for source in (GROWING.before, FIXED))
    equivalence.check_eager(before, after, [SHORT, LONG, SHORT])
    equivalence.check_ported(before, equivalence.load(FIXED, tmp_path), [LONG, LONG])


def test_a_fix_that_never_grows_is_noticed(tmp_path):
    test = "tpuport.ops.grows(places.max() >= len(self.table))"
    assert test in FIXED
    before, wrong = (
        equivalence.load(source, tmp_path)
        for source in (GROWING.before, FIXED.replace(test, "False"))
    )
    with pytest.raises(equivalence.DifferenceError):
        equivalence.check_eager(before, wrong, [LONG])


def test_plain_torchax_keeps_the_table(tmp_path):
    function = equivalence.load(FIXED, tmp_path)
    equivalence.check_plain(equivalence.load(FIXED, tmp_path), function, [SHORT])
    row_8 = equivalence.plain_jit(function, LONG)[:, 8:]
    assert torch.allclose(row_8, LONG[0][:, 8:] * torch.tensor(7.0).cos())


def finish(function, args):
    equivalence.plain_jit(function, args)
    jax.effects_barrier()


def test_plain_torchax_reports_a_short_table_with_debug_checks(tmp_path):
    function = equivalence.load(FIXED, tmp_path)
    with ops.debug_checks():
        finish(function, SHORT)
        with pytest.raises(Exception, match="a table in self is too short"):
            finish(function, LONG)


@pytest.mark.parametrize("test", [True, False, 3, torch.tensor(True)])
def test_grows_is_its_test_in_eager_pytorch(test):
    assert ops.grows(test) is test


def test_a_memory_of_all_calls_is_found(tmp_path):
    (found,) = find(MEMORY, rules=[GrowingCache])
    assert (found.code, found.line) == ("TPU412", 10)
    assert HARMS["forgets"](equivalence.load(MEMORY, tmp_path), [(torch.ones(2, 4),)] * 2) is None
