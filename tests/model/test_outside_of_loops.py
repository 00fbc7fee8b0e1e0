"""Rounds that change what is outside of the call, which a body that is traced once changes once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import tpuport
from tests.model.test_long_loops import rolled

COUNTS: dict[str, Any] = {}
LOG: list[int] = []


class Shared:
    count = 0


pytestmark = pytest.mark.usefixtures("short")


def item_of_a_global(x: torch.Tensor) -> torch.Tensor:
    COUNTS["n"] = 0
    for _ in range(6):
        COUNTS["n"] += 1
        x = x * 0.5 + COUNTS["n"]
    return x


def global_list(x: torch.Tensor) -> torch.Tensor:
    LOG.clear()
    for _ in range(6):
        LOG.append(1)
        x = x * 0.5 + len(LOG)
    return x


def class_attribute(x: torch.Tensor) -> torch.Tensor:
    Shared.count = 0
    for _ in range(6):
        Shared.count += 1
        x = torch.cat([x, x[-1:] + Shared.count])
    return x


def default(x: torch.Tensor, kept: list[int] = [0]) -> torch.Tensor:  # noqa: B006
    kept[0] = 0
    for _ in range(6):
        kept[0] += 1
        x = x * 0.5 + kept[0]
    return x


@pytest.mark.parametrize("run", [item_of_a_global, global_list, class_attribute, default])
def test_a_round_that_changes_what_is_outside(run: Callable[..., Any]):
    ported = tpuport.convert(run, verify=False)
    for _ in range(2):
        x = torch.randn(2, 4)
        torch.testing.assert_close(tpuport.to_torch(ported(x)), run(x))
    assert not rolled(ported)


def counts_outside(x: torch.Tensor) -> torch.Tensor:
    COUNTS["n"] = 0
    while x.sum() > 1:
        COUNTS["n"] += 1
        x = x * 0.5 - COUNTS["n"] * 0.01
    return x


def test_a_loop_on_a_traced_value_that_changes_what_is_outside_is_refused():
    with pytest.raises(tpuport.PortError, match=r"(?s)TPU104.*does not carry.*while x.sum\(\) > 1"):
        tpuport.convert(counts_outside)(torch.rand(2, 4) + 1)


def kept_at_first_use(x: torch.Tensor) -> torch.Tensor:
    while x.sum() > 1:
        if "scale" not in COUNTS:
            COUNTS["scale"] = 0.5
        x = x * COUNTS["scale"]
    return x


def test_a_value_that_is_set_at_first_use_is_no_change():
    COUNTS.clear()
    x = torch.rand(2, 4) + 1
    found = tpuport.to_torch(tpuport.convert(kept_at_first_use)(x))
    torch.testing.assert_close(found, kept_at_first_use(x))
