"""The demo: both models ported and compared, the story told, nothing fetched."""

import io
import re
import socket
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torchax
from rich.console import Console

from tpuport import demo
from tpuport.demo import story
from tpuport.demo.models import DemoModel, make_planner, make_video_transformer
from tpuport.demo.page import to_page
from tpuport.demo.plain_torchax import failure_of, run_plain
from tpuport.demo.planner import BatchFeature, DiffusionPlanner, RotaryEmbedding
from tpuport.reports.report import PortReport

# What a quiet machine with two cores does in well under three minutes.
CPU_SECONDS = 170


class Told(NamedTuple):
    """One run of the demo."""

    agrees: bool
    text: str
    page: Path
    seconds: float


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> Told:
    def refuse(*args: object) -> None:
        raise AssertionError(f"the demo opened a connection: {args}")

    def first_block(make: Callable[[], DemoModel], blocks: str) -> DemoModel:
        example = make()
        del getattr(example.model, blocks)[1:]
        return example

    out = tmp_path_factory.mktemp("demo") / "report.html"
    text = io.StringIO()
    start = time.process_time()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        patch.setattr(story, "_REPEATS", 1)
        for name, blocks in (("video_transformer", "transformer_blocks"), ("planner", "blocks")):
            make = getattr(story, f"make_{name}")
            patch.setattr(story, f"make_{name}", partial(first_block, make, blocks))
        console = Console(file=text, width=100, highlight=False)
        agrees = demo.run(out=out, console=console, verbose=True)
    return Told(agrees, text.getvalue(), out, time.process_time() - start)


def test_both_ports_agree(told: Told):
    assert told.agrees
    assert "Both ports agree with eager PyTorch" in told.text
    for name in ("HunyuanVideo15Transformer3DModel", "DiffusionPlanner"):
        assert f"✔ {name} agrees with eager PyTorch" in re.sub(r" +", " ", told.text)
    for kind in ("output", "gradient", "buffer"):
        assert re.search(rf"✔ \d+ {kind}s as in eager PyTorch; worst relative error", told.text)


def test_it_shows_where_plain_torchax_stops(told: Told):
    assert len(re.findall(r"✘ \w+: ConcretizationTypeError: Abstract tracer", told.text)) == 3
    for source in (
        "if is_t2v:",
        "length = int(positions.max().item()) + 1",
        "alpha = self.alphas[step].item()",
    ):
        assert source in told.text


@pytest.mark.parametrize(
    ("what", "eager", "plain"),
    [
        ("NaN in the refined prompt, where padding attends to nothing", "none", "100% of it"),
        ("BatchNorm's running mean after a training step", "updated", "as before"),
        ("the noise of two calls of one jitted step", "different", "the same"),
        ("NaN in attention, where a sample has no context", "none", r"\d+% of it"),
    ],
)
def test_it_shows_where_plain_torchax_differs_silently(
    told: Told, what: str, eager: str, plain: str
):
    assert re.search(rf"{re.escape(what)} +{eager} +{plain}", told.text)


def test_it_shows_fresh_noise_and_speed(told: Told):
    assert "✔ each call of the jitted sampler draws fresh noise" in told.text
    assert "✔ torch.manual_seed repeats it" in told.text
    ratios = re.findall(r"takes (\d+\.\d\d)x the time of eager PyTorch", told.text)
    assert len(ratios) == 4  # each at its place, and in the lines at the end
    assert all(0 < float(ratio) < 50 for ratio in ratios)


def test_the_page_holds_both_reports_and_loads_nothing(told: Told):
    page = told.page.read_text(encoding="utf-8")
    assert page.count("<iframe") == 2
    assert not re.search(r"<script|\bsrc=|https?://[^\s&]+\.(js|css)", page)


def test_it_is_quick(told: Told):
    assert told.seconds < CPU_SECONDS


@pytest.mark.parametrize(("ok", "sound"), [(False, True), (True, False)])
def test_it_says_so_when_a_port_differs(monkeypatch, tmp_path, ok: bool, sound: bool):
    found = story.ToldModel("Model", PortReport("Model"), sound, [(sound, "a line")])
    monkeypatch.setattr(PortReport, "ok", ok)
    monkeypatch.setattr(story, "_told", lambda *args, **kwargs: found)
    text = io.StringIO()
    assert not demo.run(out=tmp_path / "r.html", console=Console(file=text, width=100))
    assert "A port differs" in text.getvalue()


def test_it_ends_in_fifteen_lines(told: Told):
    """Without -v nothing else is printed; what these lines say is in the long form too."""
    end = told.text[told.text.rindex("─\n") + 2 :].splitlines()
    assert len(end) + 2 <= 15, end  # the heading, and where there is more
    assert sum(line.startswith("Both ports agree with eager PyTorch") for line in end) == 1
    assert sum("✘ plain torchax: " in line for line in end) == 2
    assert sum("silently different" in line for line in end) == 2
    assert sum("as in eager PyTorch; worst relative error" in line for line in end) == 2


def test_the_short_form_prints_only_what_it_keeps(monkeypatch, tmp_path):
    def told(console: Console, example: DemoModel, *args: Any) -> story.ToldModel:
        console.print("a detail")
        return story.ToldModel(example.title, PortReport("Model"), True, [(True, "a line")])

    monkeypatch.setattr(story, "_told", told)
    text = io.StringIO()
    demo.run(out=tmp_path / "r.html", console=Console(file=text, width=100))
    assert "a detail" not in text.getvalue()
    assert text.getvalue().count("✔ a line") == 2
    assert text.getvalue().endswith("tpuport demo -v\n")


def test_a_page_escapes_what_the_reports_say():
    page = to_page([PortReport("<b>&"), PortReport("Other")])
    assert "<b>" not in page
    assert page.count(" checked>") == 1


# The models.


def test_the_planner_learns_and_plans_in_eager_pytorch():
    example = make_planner()
    model = example.model
    first, second = (example.call(model).loss for _ in range(2))
    assert first != second
    first.backward()
    assert all(p.grad is not None for p in model.parameters())
    assert model.num_updates == 2
    assert model.loss_ema != 0
    model.eval()
    plan = example.call(model, "get_action").plan
    assert plan.shape == (8, 8, 3)
    assert plan.isfinite().all()
    assert (plan[..., 2].abs() <= torch.pi / 2).all()
    assert not plan.requires_grad


def test_a_sample_without_context_is_part_of_the_example():
    masks = make_planner().inputs["context_mask"]
    assert not masks[0].any()
    assert masks[2].all()
    video = make_video_transformer().inputs
    assert not video["encoder_attention_mask_2"][0].any()
    assert not video["image_embeds"].any()


def test_the_rotary_table_grows_on_demand():
    rope = RotaryEmbedding(8)
    x = torch.randn(1, 2, 3, 8)
    short = rope(x, torch.arange(3))
    assert rope.cached_length == 3
    rope(torch.randn(1, 2, 5, 8), torch.arange(5))
    assert rope.cached_length == 5
    assert torch.equal(rope(x, torch.arange(3)), short)


def test_a_feature_is_read_as_item_or_attribute():
    feature = BatchFeature({"loss": 1})
    assert feature.loss == feature["loss"] == 1
    with pytest.raises(AttributeError, match="plan"):
        _ = feature.plan


# Plain torchax.


def test_what_plain_torchax_runs_has_no_failure():
    def call(model: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": model(inputs["x"])}

    assert failure_of(torch.nn.Linear(3, 3), call, {"x": torch.ones(1, 3)}) is None


def test_running_plain_torchax_leaves_no_trace():
    env = torchax.default_env()
    key = env.prng_key
    model = DiffusionPlanner(depth=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run_plain(model, lambda m, x: m.add_noise(x)[1], torch.zeros(2, 8, 3))
    assert env.prng_key is key
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
