"""Errors in code of a package that the user cannot edit, outside of `tpuport run`."""

import importlib.util
import textwrap
import traceback
from pathlib import Path
from types import ModuleType

import pytest
import torch

import tpuport

PACKAGE = """
    import numpy as np
    import torch


    class Branch(torch.nn.Module):
        def forward(self, x):
            kept = [row for row in x]
            if x.sum() > 0:
                kept = kept[1:]
            return torch.stack(kept)


    class Host(torch.nn.Module):
        def forward(self, x):
            return x + torch.as_tensor(np.linalg.svd(x.numpy())[1]).sum()


    class Sparse(torch.nn.Module):
        def forward(self, x):
            return x.to_sparse().to_dense()


    class Rows(torch.nn.Module):
        def forward(self, x):
            return torch.unique(x.round()).unfold(0, 2, 1)
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    file = tmp_path_factory.mktemp("env") / "site-packages" / "others.py"
    file.parent.mkdir()
    file.write_text(textwrap.dedent(PACKAGE).lstrip())
    spec = importlib.util.spec_from_file_location("others", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Own(torch.nn.Module):
    """The user's module around the package's."""

    def __init__(self, inner: torch.nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor):
        return self.inner(x) + 1


@pytest.mark.parametrize(
    ("name", "line", "code"),
    [
        ("Branch", "if x.sum() > 0:", "TPU101"),
        ("Host", "return x + torch.as_tensor(np.linalg.svd(x.numpy())[1]).sum()", "TPU301"),
        ("Sparse", "return x.to_sparse().to_dense()", "TPU105"),
        ("Rows", "return torch.unique(x.round()).unfold(0, 2, 1)", "TPU203"),
    ],
)
def test_the_packages_line_and_a_way_out_are_named(
    package: ModuleType, name: str, line: str, code: str
):
    ported = tpuport.convert(Own(getattr(package, name)()))
    with pytest.raises(tpuport.PortError) as caught:
        ported(torch.randn(4, 4))
    error = caught.value
    assert (error.file, error.source_line, error.code) == (package.__file__, line, code)
    assert "in code that is not yours: `tpuport run --eager NAME`" in str(error)
    frames = traceback.extract_tb(error.__traceback__)
    inside = Path(tpuport.__file__).parent
    ours = [frame for frame in frames if inside in Path(frame.filename).parents]
    assert len(ours) <= 3, "the calls through which the error left, not the trace"


def test_own_code_is_told_what_to_write():
    ported = tpuport.convert(lambda x: x.to_sparse().to_dense())
    with pytest.raises(tpuport.PortError) as caught:
        ported(torch.randn(4, 4))
    assert "--eager" not in str(caught.value)


def test_all_frames_stay_if_asked_for(package: ModuleType, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TPUPORT_DEBUG", "1")
    ported = tpuport.convert(Own(package.Sparse()))
    with pytest.raises(tpuport.PortError) as caught:
        ported(torch.randn(4, 4))
    assert any("tracing" in f.filename for f in traceback.extract_tb(caught.value.__traceback__))
