"""HunyuanVideo-1.5's own transformer, as it is, gives eager PyTorch's numbers as one program.

Takes the wheel `hyvideo-fork`, or a checkout of Tencent-Hunyuan/HunyuanVideo-1.5 whose path is in
TPUPORT_UPSTREAM_HUNYUAN. The reference is the same script with `porting(port_modules=False)`: eager
PyTorch on the CPU. `pytest --log-cli-level=INFO` shows the differences.
"""

import contextlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import tpuport
from tpuport.compat.emulated.programs import PortWarning, programs

SCRIPT = Path(__file__).with_name("hyvideo_transformer.py")
LOG = logging.getLogger(__name__)
CHECKOUT = os.environ.get("TPUPORT_UPSTREAM_HUNYUAN")

pytestmark = [
    pytest.mark.skipif(
        CHECKOUT is None and importlib.util.find_spec("hyvideo") is None,
        reason="waits for hyvideo: pip install --no-deps hyvideo-fork, or a checkout of"
        " HunyuanVideo-1.5 in TPUPORT_UPSTREAM_HUNYUAN",
    ),
    # Eager PyTorch's word for attn_mode="torch" in the reference.
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
]


@pytest.fixture(autouse=True)
def checkout(monkeypatch):
    if CHECKOUT is not None:
        monkeypatch.syspath_prepend(CHECKOUT)


@contextlib.contextmanager
def script(**options):
    """The user's script as a module, imported inside a porting block."""
    with tpuport.porting("hyvideo", paths=[SCRIPT.parent], absent=["loguru"], **options):
        sys.path.insert(0, str(SCRIPT.parent))
        try:
            import hyvideo_transformer

            yield hyvideo_transformer
        finally:
            sys.path.remove(str(SCRIPT.parent))
            sys.modules.pop("hyvideo_transformer", None)


def far(got, want):
    """The largest difference relative to the largest element."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert not got.isnan().any()
    return ((got.double() - want.double()).abs().max() / want.double().abs().max()).item()


def outcome(module, changes, given, *, trains):
    """The output, and the gradients of all parameters by name."""
    model = module.build("cuda", **changes)
    given = module.inputs("cuda", **given)
    with torch.set_grad_enabled(trains):
        out, features = model(**given)
    gradients = {}
    if trains:
        weights = torch.linspace(-1, 1, out.numel(), device="cuda").view_as(out)
        (out * weights).sum().backward()
        gradients = {
            n: None if p.grad is None else p.grad.cpu() for n, p in model.named_parameters()
        }
    parts = [out] if features is None else [out, features]
    return model, [part.detach().cpu() for part in parts], gradients


def check(changes, given, *, trains=False, rtol=1e-4):
    """The same numbers, by one program and without a warning."""
    with script(port_modules=False) as module:
        _, want, wanted = outcome(module, changes, given, trains=trains)
        assert programs() == []
    with warnings.catch_warnings():
        warnings.simplefilter("error", PortWarning)
        with script() as module:
            model, got, gradients = outcome(module, changes, given, trains=trains)
            assert [one.report.model for one in programs()] == [type(model).__name__]
            assert programs()[0].report.verified
            assert programs()[0].report.retraces == []
    worst = max(far(a, b) for a, b in zip(got, want, strict=True))
    LOG.info("output: relative difference %.1e", worst)
    assert worst < rtol
    assert want[0].std() > 0.1
    differences = {}
    for name, gradient in wanted.items():
        assert (gradient is None) == (gradients[name] is None), name
        if gradient is not None and gradient.abs().max() > 0:
            differences[name] = far(gradients[name], gradient)
        elif gradient is not None:
            assert gradients[name].abs().max() < 1e-6, name
    if trains:
        # The last block's text goes nowhere; everything else is trained.
        assert len(differences) > 0.8 * len(wanted)
        LOG.info(
            "gradients: %.1e at most, %d compared", max(differences.values()), len(differences)
        )
        assert max(differences.values()) < rtol, max(differences, key=differences.__getitem__)


def rope(tokens):
    angles = torch.outer(torch.arange(tokens) * 0.1, torch.arange(1, 9) * 0.3)
    return {
        "freqs_cos": angles.cos().repeat_interleave(2, -1),
        "freqs_sin": angles.sin().repeat_interleave(2, -1),
    }


# Heads of 128 channels and blocks of 384 tokens, eight of them, of which four are chosen by data.
SPARSE = {
    "attn_mode": "flex-block-attn",
    "hidden_size": 256,
    "rope_dim_list": [16, 56, 56],
    "attn_param": {
        "win_size": [[1, 1, 1]],
        "win_type": "fixed",
        "win_ratio": 10,
        "tile_size": [6, 8, 8],
        "ssta_topk": 8,
        "ssta_threshold": 0.0,
        "ssta_lambda": 0.7,
        "ssta_sampling_type": "importance",
        "ssta_adaptive_pool": None,
        "attn_sparse_type": "ssta",
        "attn_pad_type": "zero",
        "attn_use_text_mask": 1,
        "attn_mask_share_within_head": 0,
    },
}
CASES = {
    "flex-block-attn": (SPARSE, {"size": (7, 9, 9)}),
    "text to video, zero vision": ({}, {"vision": "t2v"}),
    "text to video, no vision": ({}, {"vision": "none"}),
    "image to video, one sample": ({}, {"batch": 1}),
    "zero vision marked i2v": ({}, {"vision": "t2v", "mask_type": "i2v"}),
    "vision marked t2v": ({}, {"mask_type": "t2v"}),
    "odd sizes": ({}, {"size": (1, 7, 3)}),
    "patches": ({"patch_size": [1, 2, 2]}, {"size": (2, 4, 6)}),
    "rope given": ({}, rope(60)),
    "torch": ({"attn_mode": "torch"}, {}),
    "flash2": ({"attn_mode": "flash2"}, {}),
    "flash3": ({"attn_mode": "flash3"}, {}),
    "sageattn": ({"attn_mode": "sageattn"}, {}),
    "no glyphs": (
        {"glyph_byT5_v2": False, "use_cond_type_embedding": False, "vision_projection": "none"},
        {"vision": "none"},
    ),
    "linear text": ({"text_projection": "linear"}, {}),
    "single blocks": ({"mm_single_blocks_depth": 2}, {"output_features": True}),
    "guidance and mean flow": (
        {"guidance_embed": True, "use_meanflow": True},
        {"guidance": torch.tensor([6016.0]), "timestep_r": torch.tensor([500.0, 100.0])},
    ),
}
TRAINED = [
    "torch",
    # Their forward passes are tested below, and gradients of a block with "torch".
    pytest.param("image to video, one sample", marks=pytest.mark.slow),
    pytest.param("flash2", marks=pytest.mark.slow),
    # Of the function by itself, test_ssta.py.
    pytest.param("flex-block-attn", marks=pytest.mark.slow),
]


# "flash2" runs the lines around them, and tests/running has tests of these packages: flash_attn and
# provided_packages.
OF_OTHER_PACKAGES = {"flash3", "sageattn"}
# The others run every line of the package that these run (measured).
LIKE_OTHERS = {"zero vision marked i2v", "vision marked t2v", "odd sizes"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.slow] * (c in OF_OTHER_PACKAGES | LIKE_OTHERS))
        for c in CASES
    ],
)
def test_forward(case):
    changes, given = CASES[case]
    # Every line of a block runs with one; the second is for the gradients of the first one's text.
    check({"mm_double_blocks_depth": 1, **changes}, given)


@pytest.mark.parametrize("case", TRAINED)
def test_training(case):
    check(*CASES[case], trains=True)


def test_bfloat16_stays_within_its_rounding():
    """Under autocast, as upstream's pipeline and training do: without it, torch itself raises."""
    found = []
    for options in ({"port_modules": False}, {"rtol": 5e-2}):
        with script(**options) as module, torch.no_grad():
            model = module.build("cuda", torch.bfloat16, attn_mode="torch")
            given = module.inputs("cuda", torch.bfloat16)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                found.append(model(**given)[0].cpu())
            assert len(programs()) == options.get("port_modules", True)
    LOG.info("output: relative difference %.1e", far(*found))
    # bfloat16 keeps 8 bits: some 4e-3 at each rounding, of which two blocks have a few in a row.
    assert far(*found) < 3e-2


def test_later_calls_trace_once_more_for_what_the_first_left_in_a_dict():
    """`attn_param["thw"]` is new after the first call, and the same after every other."""
    with script() as module, torch.no_grad():
        model = module.build("cuda", mm_double_blocks_depth=1)
        for _ in range(4):
            model(**module.inputs("cuda"))
        (program,) = programs()
        causes = [retrace.causes for retrace in program.report.retraces]
    assert causes == [("state of the module changed: attn_param",)]


def run_script(*options):
    path = os.pathsep.join(filter(None, [CHECKOUT, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", "from tpuport.cli.app import app; app()", "run", *options]
    done = subprocess.run(
        [*command, "--package", "hyvideo", "--absent", "loguru", str(SCRIPT)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.slow
def test_the_command_samples_and_trains():
    want, _ = run_script("--no-port")
    got, said = run_script()
    assert "PortWarning" not in said
    assert got["losses"] == pytest.approx(want["losses"], rel=1e-4)
    assert got["losses"][1] < got["losses"][0]
    for vision, numbers in want["samples"].items():
        assert got["samples"][vision] == pytest.approx(numbers, rel=1e-4, abs=1e-6)
