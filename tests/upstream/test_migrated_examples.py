"""pytorch/xla's own examples, migrated, need no torch_xla and train to the same losses.

Waits for a checkout: TPUPORT_UPSTREAM_XLA=/path/to/xla (pytorch/xla at 41398bff).
"""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.migrate.running import migrate_folder, migrated_losses, original_losses, small
from tests.upstream.torch_xla_example import STEPS, torchvision
from tpuport.migrate.torch_xla import migrate

CHECKOUT = os.environ.get("TPUPORT_UPSTREAM_XLA", "")
EXAMPLES = Path(CHECKOUT) / "examples"
TINY = (
    *("--hidden-size=32", "--num-attention-heads=4", "--num-key-value-heads=2"),
    *("--intermediate-size=64", f"--num-steps={STEPS}"),
)
FILES = {
    "train_resnet_base.py": (),
    "train_decoder_only_base.py": TINY,
    "data_parallel/train_resnet_spmd_data_parallel.py": (),
    "fsdp/train_decoder_only_fsdp_v2.py": (),
    "decoder_only_model.py": None,
}

pytestmark = [
    pytest.mark.skipif(not EXAMPLES.is_dir(), reason="TPUPORT_UPSTREAM_XLA names no checkout"),
    pytest.mark.filterwarnings("ignore:torch_xla. one process runs"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    texts = {name: (EXAMPLES / name).read_text(encoding="utf-8") for name in FILES}
    made = tmp_path_factory.mktemp("examples")
    migrate_folder({name: small(text, STEPS) for name, text in texts.items()}, made)
    return made


@pytest.mark.parametrize("name", [name for name, given in FILES.items() if given is not None])
def test_a_migrated_example_has_the_losses_of_the_original(name, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", torchvision())
    expected = original_losses(folder / "before" / name, *FILES[name])
    got = migrated_losses(folder / "after" / name, *FILES[name])
    assert len(expected) == STEPS
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_second_migration_changes_nothing(folder):
    texts = {str(folder / "after" / n): (folder / "after" / n).read_text() for n in FILES}
    assert {name: one.after for name, one in migrate(texts).items()} == texts
