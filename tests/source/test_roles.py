"""What runs a function, inside a file and across files."""

import textwrap

import pytest

from tpuport.rules._apply import find, rewrite
from tpuport.source.inference.cross_file import find_reached, summarise
from tpuport.source.inference.roles import Roles
from tpuport.source.rewrite.finding import Severity
from tpuport.source.syntax.module import Module

HEAD = "import torch\nimport jax\nfrom torch import nn, Tensor\n"


def roles(source: str, file: str = "model.py") -> dict[str, str]:
    """The role of each function of a file."""
    found = Roles(Module(HEAD + textwrap.dedent(source), file=file))
    return {
        function.name: "off tpu" if found.is_off_tpu(function) else found.of(function).value
        for function in found.everything
    }


def test_a_module_runs_its_forward_and_what_that_calls():
    found = roles("""
        class Model(nn.Module):
            def __init__(self, dim):
                self.weight = make(dim)

            def forward(self, x):
                return self._norm(scaled(x))

            def _norm(self, x):
                return x

            def load_weights(self, path):
                return torch.load(path)

            def save_pretrained(self, path):
                pass

            def chat(self, tokenizer, question):
                return self.forward(tokenizer(question))

            def name(self):
                return "model"

        def make(dim):
            return torch.ones(dim)

        def scaled(x):
            return x * 2

        def unused(a):
            return a
    """)
    assert found == {
        **{"__init__": "setup", "forward": "step", "_norm": "step", "load_weights": "setup"},
        **{"save_pretrained": "host", "chat": "host", "name": "host", "make": "host"},
        **{"scaled": "step", "unused": "host"},
    }


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(x: Tensor): pass", "step"),
        ("def f(x): return x.unsqueeze(0)", "step"),
        ("def f(x): return x + 1", "host"),
        ("def f(x, y): return torch.cat([x, y])", "step"),
        ("def f(x): return torch.zeros(x)", "host"),
        ("def f(): return torch.cat(WEIGHTS)", "host"),
        ("def save_image(x: Tensor): pass", "host"),
        ("def collate_fn(x): return x.unsqueeze(0)", "host"),
        ("@jax.jit\ndef f(a): return a", "step"),
        ("@torch.compile(mode='x')\ndef f(a): return a", "step"),
        ("def f(a): return a\ng = jax.jit(f)", "step"),
        ("def f(x: Tensor): pass\nif __name__ == '__main__':\n    f(1)", "host"),
        ("def train_step(batch): pass", "step"),
        ("class D(torch.utils.data.Dataset):\n    def get(self, x: Tensor): pass", "host"),
        ("class P(DiffusionPipeline):\n    def __call__(self, x: Tensor): pass", "host"),
        ("class AttnProcessor:\n    def __call__(self, attn, x: Tensor): pass", "step"),
        ("class VaeImageProcessor:\n    def __call__(self, x: Tensor): pass", "host"),
        ("class Kernel:\n    def __call__(self, attn, x: Tensor): pass", "step"),
        ("class M(nn.Module):\n    def sample(self, n): return self.net(n)", "step"),
        ("class M(nn.Module):\n    def sample(self, n): return n", "host"),
        ("def f(x: Tensor) -> bool: return x.any().item()", "host"),
        ("def f(x: Tensor) -> Tensor: return x", "step"),
        ("def f(x: Tensor) -> None: x.zero_()", "step"),
        (
            "class M(nn.Module):\n    def predict(self, x) -> int: return self.net(x)",
            "host",
        ),
        ("class Stop:\n    def __call__(self, x: Tensor) -> bool: return x.any()", "host"),
        ("def f(model: PreTrainedModel): model.to('cpu')", "host"),
        ("def f(x: 'PreTrainedModel | None'): x.to('cpu')", "host"),
        ("def f(x: Optional[Reply]): return x.max()", "host"),
        ("def f(x: Any): return x.unsqueeze(0)", "step"),
        ("def f(x: T): return x.unsqueeze(0)", "step"),
        ("def f(x: 'Tensor or so'): return x.unsqueeze(0)", "step"),
        ("def f(x: ModelOutput): return x.unsqueeze(0)", "step"),
        ("from PIL import Image\ndef f(x: Tensor): return Image.fromarray(x.numpy())", "host"),
        ("def write_audio(x: Tensor): pass", "host"),
        ("def postprocess(x: Tensor): pass", "host"),
        ("def expand_for_generation(x: Tensor): pass", "host"),
        ("class Eta(LogitsWarper):\n    def __call__(self, x: Tensor): pass", "host"),
        ("class B(ModularPipelineBlocks):\n    def __call__(self, t: Tensor): pass", "host"),
    ],
)
def test_functions_by_name_and_parameters(source: str, expected: str):
    assert list(roles(source).values()) == [expected]


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("model.py", "step"),
        ("dataset.py", "host"),
        ("data/transforms.py", "host"),
        ("scripts/run.py", "host"),
        ("tokenization_x.py", "host"),
        ("attention_processor.py", "step"),
        ("image_processor.py", "host"),
        ("feature_extraction_x.py", "host"),
        ("layers.py", "step"),
        ("generation_x.py", "host"),
        ("generation/utils.py", "host"),
        ("exporters/onnx.py", "host"),
        ("model_debugging_utils.py", "host"),
    ],
)
def test_the_file_decides_where_nothing_else_does(file: str, expected: str):
    assert roles("def f(x: Tensor): pass", file) == {"f": expected}


def test_a_class_that_works_around_models_hands_that_on():
    found = roles("""
        class LogitsProcessor:
            def __call__(self, scores: Tensor):
                raise NotImplementedError

        class Eta(LogitsProcessor):
            def clipped(self, scores: Tensor):
                return scores
    """)
    assert found == {"__call__": "host", "clipped": "host"}


def test_what_a_step_calls_is_part_of_it_whatever_it_returns():
    found = roles("""
        class Model(nn.Module):
            def forward(self, x: Tensor):
                return x if self.is_padded(x) else write_rows(x)

            def is_padded(self, x: Tensor) -> bool:
                return x.any().item()

        def write_rows(x: Tensor) -> int:
            return x.sum().item()
    """)
    assert set(found.values()) == {"step"}


def test_a_loop_over_tokens_is_host_and_so_are_its_private_helpers():
    found = roles("""
        class Model(nn.Module):
            def forward(self, x: Tensor):
                return self._norm(x)

            def generate(self, x: Tensor, streamer=None):
                streamer.put(self._words(self._norm(self(x))))
                return self.embed(x)

            def sample(self, x: Tensor, steps: int, generation_config=None):
                return self(x)

            def _norm(self, x: Tensor):
                return x

            def _words(self, x: Tensor):
                return x

            def embed(self, x: Tensor):
                return x
    """)
    steps = {name for name, role in found.items() if role == "step"}
    assert steps == {"forward", "sample", "_norm", "embed"}


def test_code_behind_cuda_kernels_is_no_step():
    found = roles("""
        from flash_attn import flash_attn_func, flash_attn_varlen_func

        class FlashAttention(nn.Module):
            def forward(self, q: Tensor, mask: Tensor):
                q = q * 2
                return self._flash(q, mask)

            def _flash(self, q: Tensor, mask: Tensor):
                if mask is not None:
                    return flash_attn_varlen_func(self._unpad(q, mask))
                else:
                    return flash_attn_func(q)

            def _unpad(self, q: Tensor, mask: Tensor):
                return q[mask]

        class Attention(nn.Module):
            def forward(self, q: Tensor):
                if self.fast:
                    return flash_attn_func(q)
                return shared(q)

        def shared(q: Tensor):
            return q
    """)
    steps = [name for name, role in found.items() if role == "step"]
    assert steps == ["shared", "forward"]
    assert found["_unpad"] == found["_flash"] == "off tpu"


def test_what_only_gpus_run_is_host_code_for_cuda_and_is_not_rewritten():
    source = HEAD + textwrap.dedent("""
        from flash_attn import flash_attn_varlen_func

        def attend(q: Tensor, mask: Tensor):
            longest = mask.sum(-1).max().item()
            return flash_attn_varlen_func(q[mask > 0], longest)

        def forward(x: Tensor, counts: Tensor):
            if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0:
                print(counts.tolist())
            return x
    """)
    found = {f.code: f.severity for f in find(source) if not f.code.startswith("TPU5")}
    assert found == dict.fromkeys(found, Severity.DEVICE)
    assert {"TPU110", "TPU210"} <= set(found)
    assert rewrite(source).source == source


# Across files.


def reached(files: dict[str, str]) -> dict[str, set[str]]:
    summaries = {
        file: summarise(Module(HEAD + textwrap.dedent(source), file=file))
        for file, source in files.items()
    }
    return {file: set(names) for file, names in find_reached(summaries).items() if names}


MODEL = """
class Model(nn.Module):
    def forward(self, x):
        return {call}
"""


UTILS = """
def helper(a):
    return inner(a)


def inner(a):
    return a


def other(a):
    return a
"""


@pytest.mark.parametrize(
    ("statement", "call"),
    [
        ("from .utils import helper", "helper(x)"),
        ("from . import utils", "utils.helper(x)"),
        ("from pkg.utils import helper as h", "h(x)"),
        ("import pkg.utils", "pkg.utils.helper(x)"),
        ("import pkg.utils as u", "u.helper(x)"),
        ("from pkg import helper", "helper(x)"),
        ("from .. import pkg", "pkg.utils.helper(x)"),
    ],
)
def test_a_step_reaches_into_another_file(statement: str, call: str):
    files = {
        "root/pkg/__init__.py": "from .utils import helper",
        "root/pkg/model.py": statement + MODEL.format(call=call),
        "root/pkg/utils.py": UTILS,
    }
    found = reached(files)
    assert found["root/pkg/utils.py"] == {"helper", "inner"}
    roles_there = Roles(
        Module(HEAD + files["root/pkg/utils.py"], file="root/pkg/utils.py"),
        reached=frozenset(found["root/pkg/utils.py"]),
    )
    steps = {function.name for function in roles_there.steps}
    assert steps == {"helper", "inner"}


def test_names_that_lead_nowhere_are_no_obstacle():
    found = reached(
        {
            "a/one.py": "from .two import f\nfrom .missing import g" + MODEL.format(call="f(g(x))"),
            "a/two.py": "from .one import f",
            "b/two.py": "def f(a): pass",
        }
    )
    assert found == {"a/one.py": {"Model.forward"}}


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("torch.distributed.is_initialized()", []),
        ("n and dist.is_initialized()", []),
        ("torch.cuda.is_available()", []),
        ("x.is_cuda", []),
        ("x.device.type == 'cuda'", []),
        ("is_flash_attn_2_available()", []),
        ("n._attn_implementation == 'flash_attention_2'", []),
        ("n.use_flash_attn", []),
        ("x.dtype == torch.float16", []),
        ("x.dtype == torch.bfloat16", ["TPU103"]),
        ("x.device.type == 'mps'", []),
        ("x.device.type in ('mps', 'npu')", []),
        ("x.device.type in {'mps', 'cpu'}", ["TPU103"]),
        ("is_torch_npu_available()", []),
        ("torch.backends.mps.is_available()", []),
        ("is_mps", []),
        ("x.device != n.device", []),
        ("x.device == n.device", ["TPU103"]),
        ("n.mode == 'mean'", ["TPU103"]),
        ("n.use_cache", ["TPU103"]),
        ("n or torch.cuda.is_available()", ["TPU103"]),
        ("not torch.cuda.is_available()", ["TPU103"]),
        ("is_available()", ["TPU103"]),
    ],
)
def test_branches_that_ask_for_cuda_or_processes_are_no_part_of_a_step(
    test: str, expected: list[str]
):
    source = (
        f"{HEAD}def forward(x: Tensor, n):\n    if {test}:\n        return float(x)\n    return x\n"
    )
    found = [f for f in find(source) if f.severity is not Severity.DEVICE]
    assert [finding.code for finding in found] == expected
    other = source.replace(
        "        return float(x)\n", "        pass\n    else:\n        float(x)\n"
    )
    assert [finding.code for finding in find(other)] == ["TPU103"]


@pytest.mark.parametrize(
    ("test", "expected"),
    [
        ("x.dtype == torch.float16 and torch.isinf(x).any()", []),
        ("torch.isinf(x).any() and x.dtype == torch.float16", ["TPU101"]),
        ("x.dtype == torch.float16 or torch.isinf(x).any()", ["TPU101"]),
    ],
)
def test_what_a_test_asks_after_float16_is_not_asked_on_a_tpu(test: str, expected: list[str]):
    source = (
        f"{HEAD}def forward(x: Tensor):\n    if {test}:\n        x = x.clamp(0)\n    return x\n"
    )
    assert [finding.code for finding in find(source)] == expected


def test_a_function_that_looks_at_files_is_for_the_host_unless_a_step_calls_it():
    source = """
        import glob
        import os
        import numpy as np

        def structure(item, params):
            if not os.path.isfile(item):
                return None
            found = torch.load(item)
            return torch.einsum("bij,raj->brai", found["u"], found["x"])

        def clouds(folder):
            return [torch.from_numpy(np.load(each)).float() for each in glob.glob(folder)]

        def turned(u, x):
            return torch.einsum("bij,raj->brai", u, x)
    """
    assert roles(source) == {"structure": "host", "clouds": "host", "turned": "step"}
    step = """
        def forward(x: Tensor):
            return structure(x, 1)
    """
    assert roles(source + step)["structure"] == "step"
