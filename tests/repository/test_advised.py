"""What a person is told to do about a script that fails by itself."""

from importlib import metadata
from pathlib import Path

import pytest

from tpuport.repository.advised import what_helps
from tpuport.repository.packages import how_to_install
from tpuport.repository.scripts import Launch, StartScript
from tpuport.repository.sizes import ARGPARSE, ChosenArguments, Option, ScriptSettings

LOST = "PathNotFoundError: nothing found at path ''"
CHANGED = "ImportError: cannot import name 'gone' from 'rich.console' (/site/rich/console.py)"
HERE = metadata.version("rich")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            "ModuleNotFoundError(\"No module named 'absent_package.sub'\") (a.py:3)",
            "absent_package",
        ),
        (CHANGED, f"install rich==0.1, as conda_environment.yaml says: {HERE} is here"),
        ("AttributeError: module 'numpy' has no attribute 'float'", "another version of numpy"),
        (LOST, "not there: data-path (data/train.zarr); put it there, or say with --set"),
        ("SyntaxError: invalid syntax (helper.py:1).", "mend that line, which Python 3"),
        ("EOFError: EOF when reading a line (a.py:3).", "it asks a question on a terminal"),
        ("ValueError: 3", "give the arguments that it needs after --; a.sh:1 starts it with `x`"),
    ],
)
def test_what_helps(tmp_path: Path, error: str, advice: str) -> None:
    (tmp_path / "conda_environment.yaml").write_text("dependencies:\n  - pip:\n    - rich=0.1\n")
    (tmp_path / "there").touch()
    options = {
        "data-path": Option("data-path", "--data-path", default="other/place"),
        "data-root": Option("data-root", "--data-root", default="./there"),
        "output-dir": Option("output-dir", "--output-dir", default="out/put"),
        "lr": Option("lr", "--lr", default="1/2"),
    }
    entry = StartScript("a.py", trains=True, reasons=(), launches=(Launch("a.sh:1", "sh", ("x",)),))
    settings = ScriptSettings(ARGPARSE, options)
    chosen = ChosenArguments(("--data-path", "data/train.zarr"), ())
    assert advice in what_helps(error, tmp_path, entry, settings, chosen)


def test_a_script_may_have_no_arguments(tmp_path: Path) -> None:
    entry = StartScript("a.py", trains=True, reasons=())
    options = {"data-path": Option("data-path", "--data-path", default="other/place")}
    settings = ScriptSettings(ARGPARSE, options)
    advice = what_helps(LOST, tmp_path, entry, settings, ChosenArguments((), ()))
    assert "not there: data-path (other/place)" in advice


@pytest.mark.parametrize("made", [False, True])
def test_a_file_that_the_repository_makes(tmp_path: Path, *, made: bool) -> None:
    (tmp_path / "train.py").write_text("torch.load('data/waves.pt')\n")
    text = "torch.save(x, open('data/waves.pt', 'wb'))\n" if made else "save('other_waves.pt')\n"
    (tmp_path / "make_waves.py").write_text(text)
    entry = StartScript("train.py", trains=True, reasons=())
    error = "FileNotFoundError: [Errno 2] No such file or directory: 'data/waves.pt' (train.py:1)."
    settings = ScriptSettings(ARGPARSE, {})
    advice = what_helps(error, tmp_path, entry, settings, ChosenArguments((), ()))
    assert advice.startswith("it reads data/waves.pt, which is not there: put it there")
    assert ("; make_waves.py may make it" in advice) == made


def test_a_package_is_called_as_pip_knows_it(tmp_path: Path) -> None:
    assert how_to_install(["sklearn", "zarr"], tmp_path) == "`pip install scikit-learn zarr`"
    (tmp_path / "requirements.txt").write_text("scikit-learn\n")
    assert how_to_install(["cv2"], tmp_path, ["cv2", "yaml"]) == (
        "`pip install opencv-python-headless`, or with all that it imports in some cases:"
        " `pip install opencv-python-headless pyyaml`; or install all of requirements.txt"
    )


@pytest.mark.parametrize("file", ["requirements.txt", "environment.yml", "setup.py"])
def test_a_package_is_taken_from_where_the_repository_takes_it(tmp_path: Path, file: str) -> None:
    """Nothing, or something else, has the name of its import on PyPI."""
    url = "git+https://example.com/planner-devkit/@v1.2"
    line = {
        "requirements.txt": f"planner-devkit @ {url}\nnumpy\n",
        "environment.yml": f"dependencies:\n  - pip:\n    - planner-devkit[maps]@{url}\n",
        "setup.py": f"setup(install_requires=['planner-devkit @ {url}', 'numpy'])",
    }
    (tmp_path / file).write_text(line[file])
    asked = how_to_install(["planner", "cv2", "planning"], tmp_path)
    wanted = f"`pip install 'planner-devkit @ {url}' opencv-python-headless planning`"
    assert asked.startswith(wanted)


def test_a_package_of_its_own_is_no_beginning_of_another(tmp_path: Path) -> None:
    url = "https://example.com/torch_scatter.whl"
    (tmp_path / "requirements.txt").write_text(f"torch>=2.1\ntorch-scatter @ {url}\n")
    asked = how_to_install(["torch", "torch_scatter"], tmp_path)
    assert asked.startswith(f"`pip install torch 'torch-scatter @ {url}'`")


def test_a_script_that_stops_at_one_package_is_told_of_all(tmp_path: Path) -> None:
    entry = StartScript("a.py", trains=True, reasons=(), maybe_missing=("absent_a", "absent_b"))
    error = "ModuleNotFoundError: No module named 'absent_b'"
    settings = ScriptSettings(ARGPARSE, {})
    advice = what_helps(error, tmp_path, entry, settings, ChosenArguments((), ()))
    assert advice == (
        "`pip install absent_b`, or with all that it imports in some cases:"
        " `pip install absent_b absent_a`"
    )
