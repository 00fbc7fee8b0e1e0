"""Loading peaks near the size of the file, counted in the resident set of a fresh process."""

from pathlib import Path

import pytest

from benchmarks import loading

MEGABYTES = 512


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return loading.write_files(tmp_path_factory.mktemp("weights"), MEGABYTES)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        (loading.OURS, 1.2),
        (f"{loading.OURS} of a .pt file", 1.2),
        # Half the file, and the float32 tensors that the readers are at.
        (f"{loading.OURS}, dtype='bfloat16'", 0.9),
    ],
)
def test_loading_needs_no_second_copy(paths: dict[str, Path], name: str, most: float):
    kind = loading.CONTESTANTS[name][0]
    assert 0.4 < loading.load_apart(name, paths[kind]).memory < most


def test_a_second_copy_would_be_noticed(paths: dict[str, Path]):
    found = loading.load_apart("torch.load, then jax arrays", paths["torch"])
    assert found.memory > 1.5


def test_the_page_shows_each_contestant_beside_ours():
    results = {
        loading.OURS: [loading.Load(9.0, 2.0, 1.01), loading.Load(9.5, 4.0, 1.02)],
        loading.MAPPED: [loading.Load(9.0, 1.0, 1.0), loading.Load(9.0, 4.0, 1.0)],
    }
    text = loading.page(results, MEGABYTES)
    assert f"| {loading.OURS} | 1.02x | 9.25 | 3.00 | 1.00x |" in text
    assert f"| {loading.MAPPED} | 1.00x | 9.00 | 2.50 | 1.50x |" in text
    assert "medians of 2 rounds" in text
