"""ReCogDrive's own code, unedited, computes as programs what it computes in eager PyTorch.

Waits for a checkout: TPUPORT_UPSTREAM_RECOGDRIVE=/path/to/recogdrive (zorrofox/recogdrive at
6b4663b), and for timm, peft, omegaconf, einops, diffusers and transformers. What else it imports
(nuplan, torchvision, ...) need not be there.
"""

import contextlib
import copy
import importlib.util
import json
import math
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tpuport
from tests.upstream.recogdrive_checkout import (
    CHECKOUT,
    PLANNER,
    needs,
    needs_checkout,
    old_checkpoint,
    old_timm,
)
from tpuport.compat.emulated.programs import programs

pytestmark = [
    needs_checkout,
    needs(PLANNER),
    old_timm,
    *old_checkpoint,
    # What upstream itself is warned of.
    pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning"),
]
HERE = Path(__file__).parent
ABSENT = (
    *("nuplan", "decord", "torchvision", "pytorch_lightning", "pyquaternion", "pandas"),
    *("shapely", "matplotlib", "hydra"),
)
PLANNER = "ReCogDriveDiffusionPlanner"
METHODS = ("get_action", "sample_chain", "get_logprobs", "p_mean_variance")
PATHS = [CHECKOUT, str(Path(CHECKOUT) / "internvl_chat")]


@contextlib.contextmanager
def ported(script=None):
    """The names of a user's script (or none), where upstream's modules become programs."""
    methods = tuple(f"{PLANNER}.{method}" for method in METHODS)
    with tpuport.porting("navsim", "internvl", absent=ABSENT, methods=methods):
        yield SimpleNamespace(**runpy.run_path(str(HERE / script))) if script else None


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    for path in PATHS:
        monkeypatch.syspath_prepend(path)


def the_program():
    """The one module that became programs, compared with eager PyTorch and never traced again."""
    (model,) = programs()
    assert model.report.verified
    assert model.report.retraces == []
    assert all(one.tolerance <= 1e-4 for one in model.report.parity)
    return model


def relative(expected, got):
    expected, got = expected.detach().cpu().double(), got.detach().cpu().double()
    return ((expected - got).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def same_gradients(host, device):
    """The gradients of a module in eager PyTorch on the CPU and of the ported one."""
    largest = max(p.grad.abs().max().item() for p in host.parameters() if p.grad is not None)
    for (name, ours), theirs in zip(device.named_parameters(), host.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None or not ours.grad.any(), name
        else:
            assert (ours.grad.cpu() - theirs.grad).abs().max() <= 1e-4 * largest, name


# -- the planner -----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", ["ddim", "flow"])
def test_the_planner_trains_with_fresh_noise(sampler):
    with ported("recogdrive_planner.py") as script:
        planner = script.build(sampler)
        torch.manual_seed(3)
        first = script.train(planner, 3, lr=0.0)
        torch.manual_seed(3)
        again = script.train(planner, 3, lr=0.0)
        assert len(set(first)) == 3
        assert again == first
        assert {p.dtype for p in planner.parameters()} == {torch.float32}
        the_program()


CALLS = {
    "get_action": lambda script, p: p.get_action(*script.inputs()).pred_traj,
    "get_action without noise": lambda script, p: (
        p.get_action(*script.inputs(), deterministic=True).pred_traj
    ),
    "sample_chain": lambda script, p: p.sample_chain(*script.features()[:3])[0],
}


@pytest.mark.parametrize("sampler", ["ddim", "ddpm", "flow"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@torch.no_grad()
def test_a_sampler_is_one_program(sampler, call):
    with ported("recogdrive_planner.py") as script:
        planner = script.build(sampler)
        first, second = (call(script, planner) for _ in range(2))
        assert first.isfinite().all()
        assert first.device.type == "cuda"
        assert not torch.equal(first, second)
        the_program()


@pytest.mark.parametrize("sampler", ["ddim", "ddpm"])
def test_log_probabilities_and_their_gradients(sampler):
    with ported("recogdrive_planner.py") as script:
        planner = script.build(sampler)
        host = copy.deepcopy(planner).cpu()
        tokens, history, status, _, chain = script.features()
        expected = host.get_logprobs(*(x.cpu() for x in (tokens, history, status, chain)))
        expected.mean().backward()
        for _ in range(2):
            planner.zero_grad()
            got = planner.get_logprobs(tokens, history, status, chain)
            got.mean().backward()
        assert relative(expected, got) < 1e-4
        same_gradients(host, planner)
        the_program()


@pytest.mark.parametrize("deterministic", [True, False])
@torch.no_grad()
def test_the_log_variance_is_upstreams_to_the_letter(deterministic):
    """Sigma is clamped in place at 1e-10 before its square: at the last step -45.36, not -46.05."""
    with ported("recogdrive_planner.py") as script:
        planner = script.build("ddim")
        host = copy.deepcopy(planner).cpu()
        generator = torch.Generator().manual_seed(1)
        x, vl = torch.randn(2, 8, 3, generator=generator), torch.randn(2, 5, 32)
        history, status = torch.randn(2, 8, 32), torch.randn(2, 32)
        for index, time in enumerate(host.ddim_t.tolist()):
            steps = torch.full((2,), time), torch.full((2,), index)
            given = (x, *steps, vl, history, status)
            expected = host.p_mean_variance(*given, deterministic=deterministic)
            got = planner.p_mean_variance(*(g.cuda() for g in given), deterministic=deterministic)
            # The last bits of a logarithm are a library's own.
            torch.testing.assert_close(got[1].cpu(), expected[1], rtol=1e-6, atol=1e-6)
            assert max(relative(a, b) for a, b in zip(expected[::2], got[::2], strict=True)) < 1e-4
        clamped = torch.tensor(1e-10).square().add(1e-20).log()
        torch.testing.assert_close(got[1].cpu(), clamped.expand_as(got[1]), rtol=1e-6, atol=1e-6)
        assert clamped.item() == pytest.approx(-46.0517 + math.log(2), abs=1e-3)
        the_program()


@torch.no_grad()
def test_the_default_action_is_finite_after_a_training_step():
    """The frozen eta is the inverse of a tanh that is 1: weight decay would make it NaN."""
    with ported("recogdrive_planner.py") as script:
        planner = script.build("ddim")
        with torch.enable_grad():
            script.train(planner, 1)
        assert planner.eta.eta_logit.isinf().all()
        assert planner.get_action(*script.inputs()).pred_traj.isfinite().all()


# -- its agent -------------------------------------------------------------------------------------


def agent_batch(index):
    generator = torch.Generator().manual_seed(index)
    sizes = {
        "history_trajectory": (2, 4, 3),
        "high_command_one_hot": (2, 4),
        "last_hidden_state": (2, 20, 1536),
        "status_feature": (2, 8),
    }
    features = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    trajectory = torch.randn(2, 8, 3, generator=generator, dtype=torch.float64)
    return features, {"trajectory": trajectory.cuda()}


def test_the_agent_trains_and_is_evaluated():
    """Its constructor and `forward` say `.cuda()`; the poses of real caches are float64."""
    with ported():
        upstream = importlib.import_module("navsim.agents.recogdrive.recogdrive_agent")
        torch.manual_seed(0)
        agent = upstream.ReCogDriveAgent(
            trajectory_sampling=None, vlm_size="small", dit_type="small", sampling_method="ddim"
        )
        assert next(agent.parameters()).is_cuda
        optimizer = agent.get_optimizers()["optimizer"]
        for index in range(4):
            features, targets = agent_batch(index)
            agent.train(index % 2 == 0)
            if agent.training:
                optimizer.zero_grad()
                loss = agent.compute_loss(features, targets, agent(features, targets))
                loss.backward()
                optimizer.step()
                assert loss.dtype == torch.float32
            else:
                with torch.no_grad():
                    predictions = agent(features)
                    loss = agent.compute_loss(features, targets, predictions)
                assert predictions["pred_traj"].shape == (2, 8, 3)
            assert loss.isfinite()
        (model,) = programs()
        assert model.report.verified
        # Training and evaluation are two programs, and neither is compiled again.
        assert len(model.report.retraces) == 1


# -- the vision-language model ---------------------------------------------------------------------

LANGUAGES = ("Qwen2ForCausalLM", "InternLM2ForCausalLM")


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("left", [False, True], ids=["right", "left"])
@pytest.mark.parametrize("flags", [(1, 1), (1, 0, 1), (1, 1, 1)])
def test_the_chat_model_trains_as_in_eager(language, left, flags):
    with ported("recogdrive_internvl.py") as script:
        model = script.build(language)
        host = copy.deepcopy(model).cpu()
        batch = script.batch(*flags, left=left)
        expected = host(**{name: value.cpu() for name, value in batch.items()})
        expected.loss.backward()
        for _ in range(2):
            model.zero_grad()
            got = model(**batch)
            got.loss.backward()
        if sum(flags) == 3:  # more tiles than tokens for them: the sample is left out
            assert expected.loss.item() == got.loss.item() == 0.0
            assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
        else:
            assert relative(expected.loss, got.loss) < 1e-4
            same_gradients(host, model)
        assert got.logits.dtype == expected.logits.dtype == torch.float32
        assert relative(expected.logits, got.logits) < 1e-5
        the_program()


def test_a_flag_of_zero_leaves_its_tile_out():
    with ported("recogdrive_internvl.py") as script:
        model = script.build()
        batch = script.batch(1, 0, 1)
        loss = model(**batch).loss
        batch["pixel_values"][1] = 100.0
        assert torch.equal(model(**batch).loss, loss)
        batch["pixel_values"][2] = 100.0
        assert not torch.equal(model(**batch).loss, loss)
        the_program()


def test_too_many_image_tokens_raise_as_upstream_does():
    with ported("recogdrive_internvl.py") as script:
        model = script.build()
        model(**script.batch(1, 1))
        with pytest.raises(RuntimeError, match="must match the size of tensor b"):
            model(**script.batch(1, 0))


def test_flash_attention_is_taken_in_bfloat16_and_refused_in_float32():
    with ported("recogdrive_internvl.py") as script:
        model = script.build(flash=True)
        assert model.vision_model.config.use_flash_attn
        with pytest.raises(AssertionError):
            model(**script.batch(1, 1))
        model = model.bfloat16()
        out = model(**script.batch(1, 1, dtype=torch.bfloat16))
        out.loss.backward()
        assert out.logits.dtype == torch.bfloat16
        assert out.loss.isfinite()


# -- the same scripts from the command line --------------------------------------------------------

MAIN = "from tpuport.cli.app import app; app()"
SCRIPTS = {
    "ddim": ("recogdrive_planner.py", "--sampler", "ddim"),
    "flow": ("recogdrive_planner.py", "--sampler", "flow"),
    "internvl": ("recogdrive_internvl.py",),
}


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_runs_by_tpuport_run(script):
    options = [f"--absent={name}" for name in ABSENT]
    packages = ["--package=navsim", "--package=internvl", f"--program={PLANNER}.get_action"]
    name, *arguments = script
    path = os.pathsep.join([*PATHS, *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "run", *packages, *options, HERE / name, *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "PortWarning" not in done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == "cuda:0"
    assert len(set(found["losses"])) == 3
    if name == "recogdrive_planner.py":
        assert (found["finite"], found["fresh"], found["shape"]) == (True, True, [2, 8, 3])
    else:
        assert found["left"] > 0.0
        assert found["misaligned"] == 0.0
