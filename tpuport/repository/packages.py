"""How a package is installed that a script imports: by another name, as a rule, in a few cases."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpuport.repository.texts import read_text

# Import name -> the name on PyPI, where `pip install` of the first gives something else or nothing.
_NAME_ON_PYPI = {
    "OpenGL": "pyopengl",
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",
    "dateutil": "python-dateutil",
    "dotenv": "python-dotenv",
    "faiss": "faiss-cpu",
    "git": "gitpython",
    "hydra": "hydra-core",
    "ignite": "pytorch-ignite",
    "mpl_toolkits": "matplotlib",
    "patoolib": "patool",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "umap": "umap-learn",
    "yaml": "pyyaml",
}
_LIST = "requirements.txt"


# A requirement that is not on PyPI, in whatever file lists it: `name @ git+https://...`.
_ELSEWHERE = re.compile(
    r"""([\w.-]+)[ \t]*(?:\[[\w, ]*\])?[ \t]*@[ \t]*((?:\w+\+)?https?://[^\s"',;]+)"""
)
# `torch>=2`, and not `torch-scatter @ ...`.
_LISTED = re.compile(
    r"""^[\s"'\[(-]*(?:install_requires=\[["'])?(\w+)(?=\s*(?:[=<>~!;"',]|$))""", re.MULTILINE
)
_LISTS = ("requirements*.txt", "*.yml", "*.yaml", "setup.py", "setup.cfg", "pyproject.toml")


def how_to_install(names: Sequence[str], root: Path, others: Sequence[str] = ()) -> str:
    """Return what to do about packages that are missing here, all at once.

    Args:
        names: The names by which a script imports them.
        root: The folder of its repository.
        others: The names of those that it imports in some cases.
    """
    places = _elsewhere(root)
    ask = _command(names, places)
    if others := [name for name in others if name not in names]:
        whole = _command([*names, *others], places)
        ask += f", or with all that it imports in some cases: {whole}"
    return f"{ask}; or install all of {_LIST}" if (root / _LIST).is_file() else ask


def _command(names: Sequence[str], places: Mapping[str, str]) -> str:
    words = (places.get(name) or _NAME_ON_PYPI.get(name, name) for name in names)
    return f"`pip install {' '.join(map(shlex.quote, words))}`"


def _elsewhere(root: Path) -> dict[str, str]:
    """Return the requirements that a repository takes from elsewhere than PyPI, by imported name.

    That is the requirement's own, or its beginning: `nuplan-devkit` is imported as `nuplan`.
    """
    files = (file for pattern in _LISTS for file in sorted(root.glob(pattern)) if file.is_file())
    texts = [read_text(file) for file in files]
    listed = {name.lower() for text in texts for name in _LISTED.findall(text)}
    found: dict[str, str] = {}
    for name, url in (match for text in texts for match in _ELSEWHERE.findall(text)):
        parts = re.split(r"[-_.]+", name.lower())
        for end in range(len(parts), 0, -1):
            if end == len(parts) or parts[0] not in listed:  # else it is a package of its own
                found.setdefault("_".join(parts[:end]), f"{name} @ {url}")
    return found
