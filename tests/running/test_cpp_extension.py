"""Extensions in CUDA that a script builds: refused with what to do, or done without."""

import sys
from pathlib import Path

import pytest

import tpuport
from tpuport.foundation.errors import UsageError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_one_that_is_built_at_import_says_what_to_do(package: Path) -> None:
    (package / "cuda_only_ops.py").write_text(
        "from torch.utils.cpp_extension import load\n"
        "kernels = load('blur', sources=['blur.cpp', 'blur_kernel.cu'])\n"
    )
    with (
        tpuport.porting(),
        pytest.raises(UsageError, match=r"cuda_only_ops\.py:2: blur is built from CUDA code"),
    ):
        import cuda_only_ops  # pyright: ignore[reportMissingImports]  # noqa: F401


def test_a_package_that_catches_it_goes_on(package: Path) -> None:
    (package / "cuda_or_torch_ops.py").write_text(
        "from torch.utils import cpp_extension\n"
        "try:\n"
        "    kernels = cpp_extension.load_inline('scale', '', cuda_sources='__global__ ...')\n"
        "except Exception:\n"
        "    kernels = None\n"
    )
    with tpuport.porting():
        import cuda_or_torch_ops  # pyright: ignore[reportMissingImports]

        assert cuda_or_torch_ops.kernels is None
    sys.modules.pop("cuda_or_torch_ops")


def test_one_in_cpp_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    given = []
    monkeypatch.setattr(cpp_extension, "load", lambda *args, **kwargs: given.append((args, kwargs)))
    with tpuport.porting():
        cpp_extension.load("ops", ["ops.cpp"], verbose=True)
    assert given == [(("ops", ["ops.cpp"]), {"verbose": True})]
