"""Modules that a script imports by a name that it computes are the script's modules too."""

import ast
import textwrap
from pathlib import Path

import pytest

from tests.repository.theirs import port
from tpuport.repository.computed_imports import computed_names, modules_named
from tpuport.repository.scripts import find_scripts

MODEL = "import absent_here\n\ndef train(loss):\n    loss.backward()\n"
START = "import sys, importlib\n"
LIST = "import importlib, os\nfor name in os.listdir(os.path.dirname(__file__)):\n"

# How a script comes to `models/net.py`: its source, and other files.
WAYS: dict[str, tuple[str, dict[str, str]]] = {
    "constant": ("importlib.import_module('models.net')", {}),
    "f-string": ("importlib.import_module(f'models.{sys.argv[1]}')", {}),
    "added": ("importlib.import_module('models.' + sys.argv[1] + 't').Net", {}),
    "percent": ("importlib.import_module('models.%s' % sys.argv[1])", {}),
    "format": ("__import__('models.{}'.format(sys.argv[1]), fromlist=['x'])", {}),
    "joined": ("importlib.import_module('.'.join(['models', sys.argv[1]]))", {}),
    "name of a folder": (
        "folder = 'models'\nname = f'{folder}.{sys.argv[1]}'\nimportlib.import_module(name)",
        {},
    ),
    "relative": ("importlib.import_module('.' + sys.argv[1], package='models')", {}),
    "table": (
        "NETS = {'net': 'models.net.Net'}\nmodule, name = NETS[sys.argv[1]].rsplit('.', 1)\n"
        "getattr(importlib.import_module(module), name)",
        {},
    ),
    "entry point": ("NETS = {'net': 'models.net:Net'}\npydoc.locate(NETS[sys.argv[1]])", {}),
    "getattr of a package": (
        "import models\ngetattr(models, sys.argv[1])",
        {"models/__init__.py": "from .net import train"},
    ),
    "package that loads later": (
        "import models\nmodels.net",
        {
            "models/__init__.py": "import importlib\ndef __getattr__(name):\n"
            "    return importlib.import_module(f'.{name}', __name__)"
        },
    ),
    "registry of a folder": (
        "from models import NETS\nNETS[sys.argv[1]]",
        {"models/__init__.py": f"{LIST}    importlib.import_module(f'models.{{name[:-3]}}')"},
    ),
    "registry of a path": (
        "import models",
        {
            "models/__init__.py": "import importlib, pkgutil\n"
            "for finder, name, _ in pkgutil.iter_modules(__path__):\n"
            "    importlib.import_module(name, __package__)"
        },
    ),
    "file": (
        "importlib.util.spec_from_file_location('net', f'models/{sys.argv[1]}.py')",
        {},
    ),
    "executed": ("exec(f'from models.{sys.argv[1]} import train')", {}),
    "configuration": (
        "config = yaml.safe_load(open('configs/net.yaml'))\n"
        "module, name = config['target'].rsplit('.', 1)\n"
        "getattr(importlib.import_module(module), name)",
        {"configs/net.yaml": "model:\n  target: models.net.Net\n"},
    ),
    "configuration in a helper": (
        "from helper import build\nbuild(sys.argv[1])",
        {
            "helper.py": "import importlib\nfrom hydra.utils import instantiate\n"
            "def build(config=f'configs/{1}.yaml'):\n    return instantiate(config)",
            "configs/one.yaml": "_target_: models.net.Net\n",
        },
    ),
    "condition": ("if sys.argv[1] == 'net':\n    from models.net import train", {}),
}


def _write(root: Path, body: str, files: dict[str, str]) -> list[Path]:
    sources = {"main.py": f"{START}{body}\n", "models/net.py": MODEL, **files}
    sources |= {"models/other/far.py": "import absent_far\n", "unused.py": "import absent_unused\n"}
    for name, text in sources.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    (root / "main.py").write_text(f"{sources['main.py']}if __name__ == '__main__':\n    pass\n")
    return sorted(root.rglob("*.py"))


@pytest.mark.parametrize("way", WAYS)
def test_a_module_that_a_computed_name_may_be(tmp_path: Path, way: str) -> None:
    entry = find_scripts(tmp_path, _write(tmp_path, *WAYS[way]))[0]
    assert entry.path == "main.py"
    assert entry.trains
    assert "models/net.py" in entry.modules
    assert "unused.py" not in entry.modules
    # Whether it comes to that is not known.
    assert "absent_here" in {*entry.missing, *entry.maybe_missing}
    assert "absent_here" not in entry.missing or way == "getattr of a package"
    assert "absent_unused" not in {*entry.missing, *entry.maybe_missing}


@pytest.mark.parametrize(
    "body",
    [
        "importlib.import_module(sys.argv[1])",  # says nothing about which
        "importlib.import_module('json.' + sys.argv[1])",
        "getattr(sys, sys.argv[1])",
        "print('models.net', f'models.{sys.argv[1]}')",  # imports nothing
        "exec(open('x').read())",
        "importlib.import_module(f'models_{sys.argv[1]}')",
    ],
)
def test_what_names_no_module(tmp_path: Path, body: str) -> None:
    entry = find_scripts(tmp_path, _write(tmp_path, body, {}))[0]
    assert entry.modules == ()
    assert not entry.trains


def test_settings_of_a_module_that_a_computed_name_may_be(tmp_path: Path) -> None:
    """The size of its batches, and its options, are the script's."""
    root = tmp_path / "repo"
    root.mkdir()
    _write(root, "importlib.import_module(f'models.{sys.argv[1]}').options()", {})
    (root / "models" / "net.py").write_text(
        MODEL + "def options():\n    import argparse\n    parser = argparse.ArgumentParser()\n"
        "    parser.add_argument('--width', type=int, default=512)\n"
    )
    code, text = port(root, "--out", tmp_path / "out", "--set", "width=8")
    assert code != 2, text


def test_names_are_those_of_the_file_that_computes_them(tmp_path: Path) -> None:
    files = _write(tmp_path, "", {"models/__init__.py": ""})
    tree = ast.parse(textwrap.dedent("import importlib\nimportlib.import_module('.' + name)"))
    names = computed_names(tree)
    found = modules_named(names, tmp_path / "models" / "__init__.py", tmp_path, files)
    assert found == {".net", ".other.far"}
