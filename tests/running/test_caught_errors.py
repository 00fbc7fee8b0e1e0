"""An error of a program that a `try` of the script catches, after which the script goes on."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tpuport
from tpuport.compat.emulated.programs import PortWarning
from tpuport.compat.emulated.report import RunReport
from tpuport.foundation.errors import PortError
from tpuport.verify.draws import caught_errors, noted

GENERATOR = np.random.default_rng(0)


class Drawing(nn.Linear):
    """A layer that cannot be a program."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * GENERATOR.random()


def works(net: nn.Module) -> bool:
    try:
        net(torch.ones(2, 3).cuda())
    except Exception:
        return False
    return True


def passed_on(net: nn.Module) -> None:
    try:
        net(torch.ones(2, 3).cuda())
    except PortError:
        raise


def test_an_error_that_the_script_catches_is_named(tmp_path: Path) -> None:
    with tpuport.porting() as run, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        net: Any = nn.Sequential(Drawing(3, 3)).cuda()
        with pytest.raises(PortError, match="TPU404"):
            passed_on(net)
        assert run.report.caught == []
        with noted({"folder": tmp_path}):
            assert (works(net), works(net)) == (False, False)
    (one,) = run.report.caught
    assert Path(one.place.rpartition(":")[0]) == Path(__file__)
    assert "TPU404" in one.what
    assert (RunReport().ok, RunReport(caught=[one]).ok) == (True, False)
    assert any(w.category is PortWarning and str(w.message) == str(one) for w in said)
    assert str(one).splitlines()[0] in str(run.report)
    assert run.report.to_dict()["caught"] == [{"place": one.place, "what": one.what}]
    assert caught_errors(tmp_path) == [str(one)]
    assert caught_errors(tmp_path / "elsewhere") == []
