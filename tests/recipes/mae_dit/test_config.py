"""Configurations are read as upstream writes them; what is wrong in one is named."""

import pytest

from recipes.mae_dit.config import instantiate, load
from tpuport.foundation.errors import UsageError


def test_a_file_and_overrides(file):
    found = load(file, ["experiment.batch_size=8", "arch.stage_1.params.width=3"])
    assert found.experiment.batch_size == 8
    assert found.arch.stage_1.params == {"width": 3}
    assert found.optimizer.init_lr == 1e-3  # YAML 1.1 has a string here
    assert found.arch.ema_decay == 0.9
    assert load(file, ["arch.ema=0.114514"]).arch.ema_decay is None
    assert found.gan is not None
    assert found.gan.loss.disc_upd_start == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("experiment.batchsize=8", r"experiment\.batchsize is not .* known one is experiment\.b"),
        ("experiment.batch_size=many", r"experiment\.batch_size: expected int, got 'many'"),
        ("optimizer.betas=0.9", r"optimizer\.betas: expected a list, got 0\.9"),
        ("arch.stage_1=null", r"arch\.stage_1: expected keys with values, got None"),
        ("experiment.batch_size.x=1", "batch_size is a value, not a section"),
        ("experiment", "expected NAME=VALUE"),
    ],
)
def test_what_is_wrong_is_named(file, override, message):
    with pytest.raises(UsageError, match=message):
        load(file, [override])


@pytest.mark.parametrize("text", ["a: [", "- 1", "arch: {stage_1: {target: a}}"])
def test_files_that_are_none(tmp_path, text):
    path = tmp_path / "broken.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"broken\.yaml"):
        load(path)


def test_modules_are_made_by_their_path(tmp_path):
    made = instantiate("torch.nn.Linear", {"in_features": 2, "out_features": 3})
    assert made.weight.shape == (3, 2)
    with pytest.raises(UsageError, match="width"):
        instantiate("torch.nn.Linear", {"width": 2})
    with pytest.raises(UsageError, match="cannot be imported"):
        instantiate("torch.nn.Linea", {})
    with pytest.raises(UsageError, match="--upstream"):
        instantiate("rqvae.models.MAE.Stage1MAE", {})
    with pytest.raises(UsageError, match="no checkout"):
        instantiate("rqvae.models.MAE.Stage1MAE", {}, tmp_path)
