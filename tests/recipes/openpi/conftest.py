"""What several tests of the recipe begin with."""

from pathlib import Path

import pytest

from recipes.openpi.config import SIZES


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset `data`, and policies of the tests' size, `pi0` and `pi05`."""
    for module in ("pyarrow", "av"):
        pytest.importorskip(module)
    from recipes.openpi.make_data import make_dataset
    from recipes.openpi.make_weights import make_folder
    from tests.recipes.openpi.small import SERVED

    root = tmp_path_factory.mktemp("openpi")
    make_dataset(root / "data", episodes=3, frames=12)
    with pytest.MonkeyPatch.context() as patch:
        for kind, config in SERVED.items():
            patch.setitem(SIZES, kind, config)
            make_folder(root / kind, kind, data=root / "data")
    return root
