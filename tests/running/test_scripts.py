"""Scripts as researchers write them for CUDA: the numbers of the same script on the CPU."""

import json
import os
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

import tpuport

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))


def run(source: str, name: str, capsys) -> object:
    """What a script prints last."""
    capsys.readouterr()
    exec(compile(source, name, "exec"), {"__name__": "__main__", "__file__": name})
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def on_cpu(source: str) -> str:
    source = re.sub(r"([\"'])cuda(:0)?\1", '"cpu"', source)
    return re.sub(r"\.cuda\(.*?\)", ".cpu()", source)


def close(expected, got, path=""):
    if isinstance(expected, dict):
        assert list(expected) == list(got), path
        [close(expected[k], got[k], f"{path}.{k}") for k in expected]
    elif isinstance(expected, list):
        assert isinstance(got, list), path
        assert len(expected) == len(got), path
        [close(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(expected, got, strict=True))]
    elif isinstance(expected, float):
        # Wider than a program's own 1e-4: these numbers come after several steps of training.
        assert got == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True), path
    else:
        assert expected == got, path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_gives_the_numbers_of_the_cpu(script, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    source = script.read_text()
    expected = run(on_cpu(source), str(script), capsys)
    if "RANK" in source:
        for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
            monkeypatch.setenv(name, value)
    with tpuport.porting():
        got = run(source, str(script), capsys)
    close(expected, got)


WATCHED = (
    *("torch", "torch.cuda", "torch.cuda.amp", "torch.amp", "torch.distributed", "torch.nn"),
    *("torch.nn.functional", "torch.nn.parallel", "torch.autograd", "torch.autograd.function"),
    *("torch.utils.checkpoint", "torch.utils.data", "torch.backends.cuda", "torch.compiler"),
    *("torch.backends.cudnn", "torch._C", "torch.serialization", "threading", "builtins", "os"),
)
CLASSES = (
    *(torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.Generator, torch.UntypedStorage),
    *(torch.utils.data.DataLoader, torch.autograd.Function, torch.optim.Optimizer),
    torch.autograd.function.BackwardCFunction,
)


def everything() -> dict:
    """All that a context may have replaced, by name."""
    found: dict = {}
    for name in WATCHED:
        found |= {f"{name}.{k}": v for k, v in vars(sys.modules[name]).items()}
    for cls in CLASSES:
        found |= {f"{cls.__name__}.{k}": v for k, v in vars(cls).items()}
    for name, module in list(sys.modules.items()):
        if name.startswith(("transformers.", "diffusers.")) and "__dict__" in dir(module):
            found |= {f"{name}.{k}": v for k, v in list(vars(module).items())}
    found |= {f"environ.{k}": v for k, v in os.environ.items()}
    return found


def settings() -> tuple:
    modes = torch.overrides._get_current_function_mode_stack()
    return (
        *(list(sys.path), list(sys.meta_path), list(sys.path_hooks), list(warnings.filters)),
        *(torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()),
        *(len(modes), torch.is_autocast_enabled("cpu"), torch.is_autocast_enabled("cuda")),
        (torch.backends.cudnn.benchmark, torch._C._get_mkldnn_enabled()),
    )


class Boom(Exception):
    pass


def use() -> None:
    net = torch.nn.Linear(3, 3).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        net(torch.ones(2, 3, device="cuda")).sum().backward()


def fail() -> None:
    torch.set_default_device("cuda")
    use()
    raise Boom


def test_everything_is_the_identical_object_after_contexts_that_nest_overlap_and_fail():
    early = everything()
    with tpuport.porting():
        use()  # imports what is imported late
    late = everything()
    assert {k for k in early if early[k] is not late.get(k) and early[k] != late.get(k)} == set()
    before, state, modules = everything(), settings(), set(sys.modules)

    def check():
        after = everything()
        assert {
            k for k in before if before[k] is not after.get(k) and before[k] != after.get(k)
        } == (set())
        assert set(after) - set(before) == set()
        assert settings() == state
        assert set(sys.modules) == modules

    with tpuport.porting(), tpuport.porting(eager=("Linear",)):
        use()
    check()
    with pytest.raises(Boom), tpuport.porting():
        fail()
    check()
    first, second = tpuport.porting(), tpuport.porting()
    first.__enter__()
    second.__enter__()
    use()
    second.__exit__(None, None, None)
    first.__exit__(None, None, None)
    check()
