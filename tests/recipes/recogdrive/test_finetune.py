"""Stage 1 from a command line: its data, its flags, and a run that was killed."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from recipes.recogdrive import finetune
from recipes.recogdrive.__main__ import app
from recipes.recogdrive.finetune import (
    FinetuneOptions,
    check,
    make_optimizer,
    make_schedule,
    make_step,
    parse,
    plan_batches,
    run,
)
from recipes.recogdrive.loading import load_chat_model, save_chat_model
from tests.recipes.killing import kill_when
from tests.recipes.recogdrive.chat_data import LENGTH, Small
from tests.recipes.recogdrive.runs import has_state, logged
from tpuport.foundation.errors import UsageError
from tpuport.training.distributed import Hosts


def options(small: Small, folder: Path, **more: Any) -> FinetuneOptions:
    given = {
        "force_image_size": 56,
        "max_dynamic_patch": 4,
        "max_seq_length": 2 * LENGTH,
        "fsdp_devices": 1,
        "learning_rate": 1e-2,
        "bf16": False,
        "seed": 0,
    }
    given["meta_path"] = str(small.folder / "meta.json")
    return FinetuneOptions(str(small.folder / "model"), output_dir=str(folder), **given | more)


# -- data ------------------------------------------------------------------------------------------


def test_every_sample_is_in_every_epoch(small: Small, tmp_path: Path):
    chosen = options(small, tmp_path, num_train_epochs=2.0, row_lengths=[LENGTH])
    planned = plan_batches(chosen, small.tokenizer, small.per_tile, num_rows=2)
    assert len(planned.usable.indices) == 10
    per_epoch = len(planned) // 2
    for epoch in (planned.plan[:per_epoch], planned.plan[per_epoch:]):
        assert sorted(i for _, b in epoch for row in b.rows for i in row) == list(range(10))
    lengths = set()
    for batch in planned:
        lengths.add(batch["input_ids"].shape[1])
        images = (batch["input_ids"] == small.model.image_token).sum(axis=1)
        np.testing.assert_array_equal(images, batch["image_flags"].sum(axis=1) * small.per_tile)
    assert lengths <= {LENGTH, 2 * LENGTH}
    again = plan_batches(chosen, small.tokenizer, small.per_tile, num_rows=2)
    for name, value in planned[1].items():
        np.testing.assert_array_equal(again[1][name], value)


def test_sizes_are_kept_for_the_next_run(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first = small.data.usable(tmp_path)
    assert first.sizes == [small.data.size(index) for index in range(10)]
    monkeypatch.setattr(type(small.data), "size", lambda *_: pytest.fail("read again"))
    assert small.data.usable(tmp_path) == first


def own_images(small: Small, folder: Path) -> Path:
    """The conversations in a folder of their own; gives the image of one of them."""
    shutil.copytree(small.folder / "images", folder / "images")
    shutil.copy(small.folder / "chats.jsonl", folder)
    meta = {"a": {"root": "images", "annotation": "chats.jsonl"}}
    (folder / "meta.json").write_text(json.dumps(meta))
    lines = [json.loads(s) for s in (folder / "chats.jsonl").read_text().splitlines()]
    name = next(line["image"] for line in lines if isinstance(line.get("image"), str))
    return folder / "images" / name


def test_a_mended_image_counts_in_the_next_run(small: Small, tmp_path: Path):
    path = own_images(small, tmp_path)
    given = options(small, tmp_path, on_broken="skip", meta_path=str(tmp_path / "meta.json"))

    def usable() -> Any:
        return plan_batches(given, small.tokenizer, small.per_tile, 1).usable

    whole = usable()
    good = path.read_bytes()
    path.write_bytes(b"no image")
    assert usable().left_out == {"an image cannot be read": 1}
    path.unlink()
    assert usable().left_out == {"an image is not there": 1}
    path.write_bytes(good)
    assert usable() == whole
    Image.new("RGB", (56, 56)).save(path)
    assert usable().sizes != whole.sizes
    assert usable().left_out == {}


def test_images_that_are_cut_short_are_named_or_left_out(small: Small, tmp_path: Path):
    path = own_images(small, tmp_path)
    given = options(small, tmp_path, meta_path=str(tmp_path / "meta.json"))
    whole = plan_batches(given, small.tokenizer, small.per_tile, 1)
    path.write_bytes(path.read_bytes()[:-200])
    message = r"chats.jsonl:\d+: an image cannot be read \(1 such of 10 samples\)"
    with pytest.raises(UsageError, match=message):
        plan_batches(given, small.tokenizer, small.per_tile, 1)
    # One that breaks while the run goes on.
    with pytest.raises(UsageError, match=r"chats.jsonl:\d+: .*What to do: mend the image"):
        [whole[number] for number in range(len(whole))]
    given.on_broken = "skip"
    planned = plan_batches(given, small.tokenizer, small.per_tile, 1)
    assert planned.usable.left_out == {"an image cannot be read": 1}
    assert len(planned.usable.indices) == 9
    for number in range(len(planned)):
        assert planned[number]["input_ids"].any()


def test_broken_images_are_named_or_left_out(small: Small, tmp_path: Path):
    lines = [json.loads(s) for s in (small.folder / "chats.jsonl").read_text().splitlines()]
    lines[3]["image"] = "none.png"
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    meta = {"a": {"root": str(small.folder / "images"), "annotation": "chats.jsonl"}}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    given = options(small, tmp_path)
    given.meta_path = str(tmp_path / "meta.json")
    with pytest.raises(UsageError, match=r"chats.jsonl:4: an image is not there \(1 such of 10"):
        plan_batches(given, small.tokenizer, small.per_tile, 1)
    given.on_broken = "skip"
    planned = plan_batches(given, small.tokenizer, small.per_tile, 1)
    assert planned.usable.left_out == {"an image is not there": 1}
    assert 3 not in planned.usable.indices


def test_one_program_for_each_length_of_rows(small: Small, tmp_path: Path):
    """Whatever the numbers of tiles, samples and tokens in them are."""
    thin = small.thin()
    chosen = options(small, tmp_path, row_lengths=[LENGTH], use_packed_ds=False)
    planned = plan_batches(chosen, small.tokenizer, small.per_tile, num_rows=2)
    batches = [{n: torch.from_numpy(v) for n, v in batch.items()} for batch in planned]
    assert len({int(b["image_flags"].sum()) for b in batches}) > 2
    lengths = {b["input_ids"].shape[1] for b in batches}
    step = make_step(thin.model, chosen, steps=len(batches))
    state = step.init()
    for batch in batches:
        state, _ = step(state, batch)
    assert step.retraces == len(lengths) - 1


# -- flags -----------------------------------------------------------------------------------------

# All that upstream's script gives; its paths and numbers of devices are variables there.
SCRIPT = """--model_name_or_path m --conv_style internvl2_5 --use_fast_tokenizer False
--output_dir o --meta_path d.json --overwrite_output_dir True --force_image_size 448
--max_dynamic_patch 16 --down_sample_ratio 0.5 --drop_path_rate 0.1 --freeze_llm False
--freeze_mlp False --freeze_backbone False --vision_select_layer -1 --dataloader_num_workers 32
--bf16 True --num_train_epochs 3 --per_device_train_batch_size 1 --gradient_accumulation_steps 2
--evaluation_strategy no --save_strategy steps --save_steps 200 --save_total_limit 10
--learning_rate 4e-5 --weight_decay 0.05 --warmup_ratio 0.1 --lr_scheduler_type cosine
--logging_steps 1 --max_seq_length 12288 --do_train True --grad_checkpoint True
--group_by_length True --dynamic_image_size True --use_thumbnail True --ps_version v2
--deepspeed zero_stage1_config.json --report_to tensorboard"""


def test_upstreams_flags_are_ours():
    notes: list[str] = []
    parsed = parse([*SCRIPT.split(), "--upstream", "there"], note=notes.append)
    check(parsed)
    assert not parsed.freeze_llm
    ours = FinetuneOptions("m", "d.json", "o", upstream="there")
    different = {name for name, value in vars(parsed).items() if vars(ours)[name] != value}
    assert different == {
        *("drop_path_rate", "dataloader_num_workers", "gradient_accumulation_steps"),
        "save_total_limit",
    }
    assert [line.split()[0] for line in notes] == [
        *("--deepspeed", "--do_train", "--evaluation_strategy", "--group_by_length"),
        *("--overwrite_output_dir", "--report_to", "--save_strategy", "--use_fast_tokenizer"),
    ]
    assert "--group_by_length True has no effect: rows have static lengths" in notes[3]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--evaluation_strategy steps", "--evaluation_strategy steps: only no is there"),
        ("--save_strategy epoch", "--save_strategy epoch: only steps is there"),
        ("--do_train False", "--do_train False: only true is there"),
        ("--use_backbone_lora 16", "finetune: unknown --use_backbone_lora 16. What to do"),
        ("--freeze", "finetune: unknown --freeze. What to do"),
    ],
)
def test_other_flags_are_refused(flags: str, message: str):
    with pytest.raises(UsageError, match=message):
        parse([*SCRIPT.split(), *flags.split()])
    done = CliRunner().invoke(app, ["finetune", *SCRIPT.split(), *flags.split()])
    assert done.exit_code == 2
    assert isinstance(done.exception, SystemExit)
    assert message in done.output


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"conv_style": "phi3-chat"}, "--conv_style phi3-chat: only internvl2_5 is there"),
        ({"ps_version": "v1"}, "--ps_version v1: only v2"),
        ({"vision_select_layer": -4}, "--vision_select_layer -4: only -1"),
        ({"drop_path_rate": 0.1}, "--drop_path_rate 0.1: only 0.0 is there without --upstream"),
    ],
)
def test_what_is_not_there_is_refused(given: dict[str, Any], message: str):
    with pytest.raises(UsageError, match=message):
        check(FinetuneOptions("m", "d", "o", **given))
    check(FinetuneOptions("m", "d", "o", upstream="there", drop_path_rate=0.1))


def test_biases_and_norms_do_not_decay(small: Small):
    decayed, others = make_optimizer(small.model, FinetuneOptions("", "", "")).param_groups
    names = {id(p): n for n, p in small.model.named_parameters()}
    without = {names[id(p)] for p in others["params"]}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.05, 0.0)
    assert "vlm.model.language_model.layers.0.input_layernorm.weight" in without
    assert "vlm.model.language_model.norm.weight" in without
    assert "vlm.model.vision_tower.encoder.layer.0.layernorm_before.weight" in without
    assert "vlm.model.multi_modal_projector.layer_norm.weight" in without
    assert "vlm.model.language_model.layers.0.self_attn.q_proj.bias" in without
    for name in names.values():
        if name not in without:
            assert not name.endswith("bias")
            assert "norm" not in name


def test_a_norm_without_a_name_does_not_decay():
    """As upstream's projection, and norms of a class of their own."""

    class OwnRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

    model = torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.Linear(3, 3), OwnRMSNorm())
    decayed, others = make_optimizer(model, FinetuneOptions("", "", "")).param_groups
    names = {id(p): n for n, p in model.named_parameters()}
    assert [names[id(p)] for p in decayed["params"]] == ["1.weight"]
    without = [names[id(p)] for p in others["params"]]
    assert without == ["0.weight", "0.bias", "1.bias", "2.weight"]


def test_the_schedule_is_transformers():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([weight], lr=4e-5)
    schedule = make_schedule(optimizer, FinetuneOptions("", "", ""), steps=25)
    rates = []
    for _ in range(25):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    # Three steps up (a tenth, rounded up), then half a cosine.
    np.testing.assert_allclose(rates[:4], [0, 4e-5 / 3, 8e-5 / 3, 4e-5])
    down = 2e-5 * (1 + np.cos(np.pi * np.arange(22) / 22))
    np.testing.assert_allclose(rates[3:], down)


def test_errors_are_lines_without_a_traceback(tmp_path: Path):
    done = CliRunner().invoke(app, ["finetune", *SCRIPT.split()])
    assert done.exit_code == 2
    assert "--drop_path_rate 0.1: only 0.0 is there without --upstream" in done.output
    done = CliRunner().invoke(app, ["finetune", *SCRIPT.split(), "--upstream", "there"])
    assert done.exit_code == 2
    assert "--report_to tensorboard has no effect: metrics are in log.jsonl" in done.output
    assert "m has no config.json. What to do" in done.output
    assert "Traceback" not in done.output


# -- a run -----------------------------------------------------------------------------------------


class BegunError(Exception):
    """Instead of a step, which takes long to compile."""


def begin(*_: Any) -> None:
    raise BegunError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"seed": 1},
            r"batches was '\w+', is '\w+'; seed was 0, is 1\. What to do: give",
        ),
        ({"num_train_epochs": 1.0}, "num_batches was"),
        ({"loss_reduction": "sample"}, r"run.json\): loss_reduction was 'token', is 'sample'"),
        ({"text": "other"}, r"run.json\): data was '\w+', is '\w+'\. What to do"),
        ({"on_broken": "skip"}, r"run.json\): samples was"),
    ],
)
def test_a_run_does_not_go_on_over_other_data(
    small: Small,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    message: str,
):
    monkeypatch.setattr(finetune, "make_step", begin)
    image = own_images(small, tmp_path)
    text = (tmp_path / "chats.jsonl").read_text()
    given: dict[str, Any] = {"meta_path": str(tmp_path / "meta.json")}
    # Before there is a state, a run may begin otherwise.
    with pytest.raises(BegunError):
        run(options(small, tmp_path / "run", **given, num_train_epochs=2.0))
    with pytest.raises(BegunError):
        run(options(small, tmp_path / "run", **given))
    (tmp_path / "run" / "states" / "2").mkdir(parents=True)
    with pytest.raises(BegunError):
        run(options(small, tmp_path / "run", **given))
    if "text" in change:
        (tmp_path / "chats.jsonl").write_text(text.replace("?", "!"))
    else:
        given |= change
    if "on_broken" in change:
        image.unlink()
    with pytest.raises(UsageError, match=message):
        run(options(small, tmp_path / "run", **given))


def test_states_without_a_record_are_not_gone_on_with(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(finetune, "make_step", begin)
    (tmp_path / "states" / "2").mkdir(parents=True)
    with pytest.raises(UsageError, match=r"run.json is missing, .* or another --output_dir"):
        run(options(small, tmp_path))


@pytest.mark.parametrize("process", [0, 1])
def test_one_process_writes_the_model(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process: int
):
    called = []

    def joined() -> Hosts:
        called.append("initialize")
        return Hosts(process, 2, "torchrun")

    def loaded(*given: Any, **more: Any) -> Any:
        called.append("load")
        return load_chat_model(*given, **more)

    monkeypatch.setattr(finetune, "initialize", joined)
    monkeypatch.setattr(finetune, "load_chat_model", loaded)
    monkeypatch.setattr(finetune, "train", lambda model, *_: model)
    run(options(small, tmp_path))
    assert called == ["initialize", "load"]
    assert (tmp_path / "model" / "config.json").is_file() == (process == 0)


@pytest.mark.slow
def test_a_killed_run_goes_on_as_if_nothing_had_been(small: Small, tmp_path: Path):
    save_chat_model(small.thin().model, small.tokenizer, tmp_path / "model")
    flags = options(small, tmp_path / "killed", num_train_epochs=8.0, save_steps=2)
    flags.model_name_or_path = str(tmp_path / "model")
    arguments = [
        part
        for name, value in vars(flags).items()
        if value not in (None, [])
        for part in (f"--{name}", str(value))
    ]
    killed = tmp_path / "killed"
    kill_when(lambda: has_state(killed), *("-m", "recipes.recogdrive", "finetune", *arguments))
    before = logged(tmp_path / "killed")
    trained = run(flags)
    flags.output_dir = str(tmp_path / "whole")
    run(flags)
    resumed, whole = logged(tmp_path / "killed"), logged(tmp_path / "whole")
    assert len(before) < len(whole)
    assert resumed == whole
    assert np.mean(list(whole.values())[-4:]) < 0.8 * np.mean(list(whole.values())[:4])
    loaded, _ = load_chat_model(tmp_path / "killed" / "model")
    other, _ = load_chat_model(tmp_path / "whole" / "model")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, trained.state_dict()[name]), name
        assert torch.equal(value, other.state_dict()[name]), name
