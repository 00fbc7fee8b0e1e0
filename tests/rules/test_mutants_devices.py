"""The suite notices a wrong fix of the rules about devices, and sees what decides a severity."""

from pathlib import Path

import pytest

from tpuport.rules._apply import find, rewrite
from tpuport.rules._discovery import find_rules
from tpuport.source.rewrite.finding import Severity
from tpuport.testing import equivalence

RULES = {rule.CODE: rule for rule in find_rules()}

# Code of the rule, number of the example, and what is done wrong to its `after`.
MUTANTS = {
    "argument lost": ("TPU510", 0, "scale.sum()", "scale"),
    "receiver lost": ("TPU510", 1, ".abs()", ".clone()"),
    "statement lost": ("TPU512", 0, "y = x * 2", "y = x"),
    "wrong side": ("TPU511", 0, '"cuda" if torch.cuda', '"cuda" if not torch.cuda'),
    "wrong device": ("TPU511", 1, 'else "cpu"', 'else "meta"'),
    "wrong rank alone": ("TPU515", 0, "else 1)", "else 2)"),
    "test the wrong way round": ("TPU515", 0, "if dist.is_initialized():", "if True:"),
    "precision lost": ("TPU516", 0, "x.bfloat16()", "x.float()"),
    "another dtype": ("TPU516", 0, "dtype=torch.bfloat16", "dtype=torch.float32"),
    "region off": ("TPU513", 0, 'else "cpu"', 'else "cuda"'),
    "function lost": ("TPU517", 1, "torch.relu,", "torch.clone,"),
    "body lost": ("TPU517", 0, "x.sigmoid() * x", "x.sigmoid()"),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_wrong_fix_is_noticed(mutant: tuple[str, int, str, str], tmp_path: Path):
    code, number, old, new = mutant
    rule = RULES[code]
    example = rule.EXAMPLES[number]
    assert example.after is not None
    assert old in example.after
    mutated = equivalence.load(example.after.replace(old, new, 1), tmp_path)
    reference = equivalence.load(example.reference or example.before, tmp_path)
    inputs = equivalence.make_inputs(example.inputs, seeds=2)
    with pytest.raises(equivalence.DifferenceError):
        equivalence.check_eager(reference, mutated, inputs, rtol=rule.SAFETY.rtol)


def severities(code: str, source: str, file: str = "model.py") -> list[Severity]:
    """What one rule says about a module, in the order of its lines."""
    return [f.severity for f in find(source, rules=[RULES[code]], file=file)]


MODEL = """
import torch
import torch.distributed as dist

class Model(torch.nn.Module):
    def __init__(self, device="cuda"):
        super().__init__()
        {init}

    def forward(self, x: torch.Tensor):
        {forward}
        return x
"""


def model(*, init: str = "pass", forward: str = "pass") -> str:
    """A module with a class whose constructor and `forward` have a statement more."""
    return MODEL.format(init=init, forward=forward)


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        ("x = x.to('cuda')", Severity.ERROR),
        ("x = torch.ones_like(x, device='cuda')", Severity.ERROR),
        ("x = x + torch.zeros(3, device='cuda')", Severity.SLOW),
        ("device = torch.device('cuda')", Severity.SLOW),
    ],
)
def test_in_the_step_only_what_torchax_does_not_redirect_is_an_error(
    forward: str, expected: Severity
):
    found = severities("TPU511", model(forward=forward))
    assert found == [Severity.DEVICE, expected]  # the first is the parameter's default


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ("self.to(device)", [Severity.DEVICE, Severity.ERROR]),
        ("self.device = device; self.to(self.device)", [Severity.DEVICE, Severity.ERROR]),
        ("device = device or 'cpu'; self.to(device)", [Severity.DEVICE]),
        ("DEVICE = torch.device('cuda')", [Severity.DEVICE, Severity.ERROR]),
        ("DEVICE = 'cuda'", [Severity.DEVICE, Severity.ERROR]),
        ("self.place('cuda')", [Severity.DEVICE]),
    ],
)
def test_a_default_device_that_a_constructor_uses_is_an_error(init: str, expected: list[Severity]):
    assert severities("TPU511", model(init=init)) == expected


def test_a_default_is_a_note_however_it_is_written():
    assert severities("TPU511", "def place(x, device='cuda:0'): ...\n") == [Severity.DEVICE]
    source = "import torch\ndef place(x, device=torch.device('cuda')): ...\n"
    assert severities("TPU511", source) == [Severity.DEVICE]
    source = "import torch\nclass Options:\n    device: object = torch.device('cuda')\n"
    assert severities("TPU511", source) == [Severity.DEVICE]


def test_a_name_passed_to_a_parameter_called_device_is_found():
    source = model(init="self.place('cuda')") + "\n    def place(self, device_type): ...\n"
    assert severities("TPU511", source) == [Severity.DEVICE, Severity.ERROR]


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        ("dist.all_reduce(x)", Severity.ERROR),
        ("if self.reduce: dist.all_reduce(x)", Severity.DEVICE),
        ("dist.all_reduce(x, group=self.group)", Severity.DEVICE),
    ],
)
def test_a_collective_of_some_configurations_is_a_note(forward: str, expected: Severity):
    assert severities("TPU515", model(forward=forward)) == [expected]


def test_what_makes_a_group_is_an_error():
    body = "assert self.world_size % 8 == 0\n        mesh = dist.init_device_mesh('cpu', (1,))"
    assert severities("TPU515", model(init=body)) == [Severity.ERROR]
    assert severities("TPU515", model(init="assert dist.is_initialized(); dist.barrier()")) == []


def test_code_for_several_processes_or_for_measuring_is_a_note():
    call = "    torch.cuda.synchronize()\n"
    for head in ("def init_distributed_mode(args):", "def ring(q, sp_group):\n    sp_group.rank()"):
        assert severities("TPU512", f"import torch\n{head}\n{call}") == [Severity.DEVICE]
    step = "def step(optimizer):\n    for group in optimizer.param_groups: pass"
    assert severities("TPU512", f"import torch\n{step}\n{call}") == [Severity.ERROR]
    assert severities("TPU512", "import torch\nif ddp: torch.cuda.set_device(0)\n") == [
        Severity.DEVICE
    ]
    assert severities("TPU512", "import torch\nif gpu: torch.cuda.set_device(0)\n") == []
    timer = f"import torch\nclass Timer:\n  def __enter__(self):\n{call}"
    assert severities("TPU512", timer) == [Severity.DEVICE]


@pytest.mark.parametrize("test", ["x.device != torch.device('cuda')", "not x.is_cuda"])
def test_asking_whether_a_tensor_is_there_yet_is_no_guard(test: str):
    forward = f"if {test}: x = x.cuda()"
    assert severities("TPU510", model(forward=forward)) == [Severity.ERROR]
    assert severities("TPU510", model(forward=f"x = x.cpu() if {test} else x.cuda()")) == []


def test_code_on_the_host_counts_unless_a_port_does_without_it():
    body = "(model):\n    return model.cuda()\n"
    assert severities("TPU510", "def main" + body) == [Severity.ERROR]
    assert severities("TPU510", "def test_model" + body) == [Severity.DEVICE]
    assert severities("TPU510", "def is_fast" + body) == [Severity.DEVICE]
    assert severities("TPU510", "if __name__ == '__main__':\n    model.cuda()\n") == [
        Severity.DEVICE
    ]


def test_tests_and_benchmarks_are_notes():
    source = "import torch\nimport triton\nx = torch.zeros(3, device='cuda')\n"
    for file in ("tests/ops/test_fast.py", "benchmark_fast.py", "evals/fast.py"):
        assert severities("TPU514", source, file) == [Severity.DEVICE]
        assert severities("TPU511", source, file) == [Severity.DEVICE]
    assert severities("TPU511", source, "/home/test/project/train.py") == [Severity.ERROR]


def test_a_package_may_import_itself():
    source = "from mamba_ssm.ops import scan\n"
    assert severities("TPU514", source, "mamba_ssm/modules/block.py") == []
    assert severities("TPU514", source, "model.py") == [Severity.ERROR]


def test_an_assertion_of_cuda_is_an_error_where_it_always_runs():
    line = "assert torch.cuda.is_available()"
    assert severities("TPU512", f"import torch\n{line}\n") == [Severity.ERROR]
    assert severities("TPU512", f"import torch\nif device:\n    {line}\n") == []


def test_a_file_that_starts_the_group_itself_is_noted():
    source = model(forward="dist.all_reduce(x)") + "\ndef setup_model():\n    init_dist('nccl')\n"
    assert severities("TPU515", source) == [Severity.DEVICE]


def test_an_import_that_only_some_functions_need_is_a_note():
    body = "    import flash_attn\n    return flash_attn.f(x)\n"
    assert severities("TPU514", "import flash_attn\n") == [Severity.ERROR]
    assert severities("TPU514", "def fast_attention(x):\n" + body) == [Severity.DEVICE]
    head = "import torch\nclass A(torch.nn.Module):\n  def forward(self, x: torch.Tensor):\n"
    assert severities("TPU514", head + body) == [Severity.ERROR]


def test_forked_workers_and_scalers_are_notes():
    loader = "from torch.utils.data import DataLoader\nDataLoader([1], num_workers=2)\n"
    assert severities("TPU518", loader) == [Severity.NOTE]
    scaler = "import torch\nscaler = torch.amp.GradScaler('cuda')\n"
    assert severities("TPU513", scaler) == [Severity.DEVICE]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (
            "import torch\nfrom x import f\nf = torch.compile(f)  # faster\n",
            "something else is on its lines",
        ),
        ("import torch\nif 1 > 0:\n    f = torch.compile(f)\n", "the block would be empty"),
        ("import torch\nf = torch.compile(*fs)\n", "not clear what is wrapped"),
        ("import torch\nf = torch.compile(g)\nf._orig_mod\n", "the wrapped module"),
        ("import torch\nif y: torch.cuda.synchronize()\n", "shares its line"),
        ("x = (y.  # moved\n     cuda())\n", "there is a comment"),
        ("from torch import float16\nimport torch\nx = torch.zeros(3).half().cuda\n", "unsafe"),
    ],
)
def test_a_fix_that_would_lose_something_is_refused(source: str, reason: str):
    result = rewrite(source)
    assert result.source == source
    assert any(reason in left.reason for left in result.left), result.left


def test_the_helper_calls_the_very_method_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch):
    import torch

    from tpuport import ops

    class Recorder:
        calls: tuple[object, ...] = ()

        def cuda(self, *args: object, **kwargs: object) -> str:
            self.calls = (args, kwargs)
            return "moved"

    value = Recorder()
    assert ops.cuda(value, 0) is value
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert ops.cuda(value, 1, non_blocking=True) == "moved"
    assert value.calls == ((1,), {"non_blocking": True})
