"""A repository that trains a small model."""

from pathlib import Path

import pytest

from tests.repository.theirs import NET, TRAIN


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    root = tmp_path / "their repo"
    (root / "tools").mkdir(parents=True)
    (root / "train.py").write_text(TRAIN)
    (root / "net.py").write_text(NET)
    (root / "broken.py").write_text("def (:\n")
    (root / "tools" / "<img src=x>.py").write_text("if __name__ == '__main__':\n    print(1)\n")
    (root / "README.md").write_text(
        "```\n$ CUDA_VISIBLE_DEVICES=0 python train.py \\\n    --lr 0.1 --device=cpu\n"
        "(env)[it]$ torchrun --nproc_per_node=8 train.py --lr 1\n```\n"
    )
    return root
