"""Options of [tool.tpuport], what the command line says over them, and errors in both."""

from pathlib import Path

import pytest

from tpuport.foundation.errors import UsageError
from tpuport.lint.settings import KEYS, Settings, find_config, load_settings, override
from tpuport.source.rewrite.finding import Severity


def load(root: Path, options: str) -> Settings:
    """The settings of a pyproject.toml with these options."""
    config = root / "pyproject.toml"
    config.write_text(f"[tool.tpuport]\n{options}\n")
    return load_settings(config, start=root)


ALL_OPTIONS = """
select = ["TPU1", "tpu501"]
ignore = ["TPU103"]
severity = "note"
strict = true
exclude = ["a"]
extend-exclude = ["b"]
per-file-ignores = {"tests/*" = ["TPU1"], "*.ipynb" = ["ALL"]}
baseline = "known.json"
cache-dir = "cache"
"""


def test_every_option_is_read(tmp_path: Path):
    settings = load(tmp_path, ALL_OPTIONS)
    assert settings == Settings(
        root=tmp_path,
        config=tmp_path / "pyproject.toml",
        select=("TPU1", "TPU501"),
        ignore=("TPU103",),
        severity=Severity.NOTE,
        strict=True,
        exclude=("a",),
        extend_exclude=("b",),
        per_file_ignores={"tests/*": ("TPU1",), "*.ipynb": ("ALL",)},
        baseline=tmp_path / "known.json",
        cache_dir=tmp_path / "cache",
    )
    assert all(f"\n{key} = " in ALL_OPTIONS for key in KEYS)


def test_without_a_file_everything_has_its_default(tmp_path: Path):
    settings = load_settings(None, start=tmp_path)
    assert settings.root == tmp_path
    assert settings.severity is Severity.SLOW
    assert settings.selects("TPU101")
    assert settings.cache_dir == tmp_path / ".tpuport_cache"


def test_the_nearest_file_with_the_table_is_found(tmp_path: Path):
    inner = tmp_path / "a/b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text("[tool.tpuport]\n")
    (tmp_path / "a/pyproject.toml").write_text("[tool.ruff]\n")
    assert find_config(inner) == tmp_path / "pyproject.toml"
    (tmp_path / "a/pyproject.toml").write_text("[tool.tpuport]\n")
    assert find_config(inner) == tmp_path / "a/pyproject.toml"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("selct = []", "has no option `selct`. Did you mean select? There are select, ignore,"),
        ("zzz = 1", "has no option `zzz`. There are select"),
        ('per-file-ignore = {a = ["TPU1"]}', "Did you mean per-file-ignores?"),
        ('select = "TPU1"', "`select` has to be a list of strings, got 'TPU1'."),
        ("ignore = [1]", "`ignore` has to be a list of strings, got [1]."),
        ("strict = 1", "`strict` has to be true or false, got 1."),
        ("baseline = true", "`baseline` has to be a string, got True."),
        ("per-file-ignores = []", "has to be a table of lists of strings, got []."),
        ('per-file-ignores = {a = "TPU1"}', "has to be a table of lists of strings, got {'a'"),
        (
            'severity = "eror"',
            "has to be one of error, silent, slow, device, note, got 'eror'. Did you mean",
        ),
        (
            'severity = "loud"',
            "has to be one of error, silent, slow, device, note, got 'loud'.",
        ),
    ],
)
def test_a_wrong_option_is_named(tmp_path: Path, options: str, message: str):
    with pytest.raises(UsageError) as raised:
        load(tmp_path, options)
    assert message in str(raised.value)
    assert str(raised.value).startswith(str(tmp_path / "pyproject.toml"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[tool.tpuport\n", "not TOML: Expected"),
        (b"\xff\n", "not TOML: 'utf-8' codec"),
        (b"tool.tpuport = 3\n", "`tool.tpuport` has to be a table, got 3."),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, content: bytes, message: str):
    config = tmp_path / "pyproject.toml"
    config.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        load_settings(config, start=tmp_path)
    assert str(raised.value).startswith(f"{config}: {message}")


def test_a_file_that_is_not_there_is_named(tmp_path: Path):
    with pytest.raises(UsageError, match=r"There is no configuration file .*none\.toml\."):
        load_settings(tmp_path / "none.toml", start=tmp_path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch):
    config = tmp_path / "pyproject.toml"
    config.touch()

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UsageError, match=r"pyproject\.toml: cannot be read: Permission denied"):
        load_settings(config, start=tmp_path)


# Selecting.


@pytest.mark.parametrize(
    ("select", "ignore", "on", "off"),
    [
        (("ALL",), (), "TPU101 TPU601", ""),
        (("TPU1",), (), "TPU101 TPU104", "TPU201 TPU001"),
        (("ALL",), ("TPU1",), "TPU201", "TPU101"),
        (("ALL", "TPU101"), ("TPU1",), "TPU101", "TPU102"),
        (("TPU1",), ("TPU1",), "", "TPU101"),
        ((), (), "", "TPU101"),
    ],
)
def test_the_longer_selector_wins(select, ignore, on: str, off: str):
    settings = Settings(root=Path("/"), select=select, ignore=ignore)
    assert all(settings.selects(code) for code in on.split())
    assert not any(settings.selects(code) for code in off.split())


def test_per_file_ignores_go_by_path(tmp_path: Path):
    settings = load(tmp_path, 'per-file-ignores = {"tests/" = ["TPU1"], "*.ipynb" = ["ALL"]}')
    assert not settings.selects_in("TPU101", tmp_path / "tests/a.py")
    assert settings.selects_in("TPU201", tmp_path / "tests/a.py")
    assert settings.selects_in("TPU101", tmp_path / "a.py")
    assert not settings.selects_in("TPU201", tmp_path / "sub/a.ipynb")
    assert not settings.selects_in("TPU201", Path("/elsewhere/a.ipynb"))


def test_the_command_line_wins():
    file = Settings(root=Path("/"), select=("TPU1",), ignore=("TPU103",), strict=True)
    assert override(file, select="TPU103", ignore=None).selects("TPU103")
    added = override(file, select=None, ignore="tpu101, TPU102")
    assert added.ignore == ("TPU103", "TPU101", "TPU102")
    assert added.select == ("TPU1",)
    both = override(file, select="ALL", ignore="TPU2")
    assert (both.select, both.ignore) == (("ALL",), ("TPU2",))
    assert override(file, select=None, ignore=None, strict=None).strict
    assert not override(file, select=None, ignore=None, strict=False).strict


def test_a_selector_without_a_rule_is_named():
    known = ["TPU101", "TPU102"]
    Settings(root=Path("/"), select=("TPU",), ignore=("TPU10", "TPU101")).check_codes(known)
    with pytest.raises(UsageError, match=r"no rule TPU1O1\. Did you mean TPU101\? `tpuport rules`"):
        Settings(root=Path("/"), ignore=("TPU1O1",)).check_codes(known)
    with pytest.raises(UsageError, match=r"no rule E501\. `tpuport rules` lists them all\."):
        Settings(root=Path("/"), per_file_ignores={"a": ("E501",)}).check_codes(known)
