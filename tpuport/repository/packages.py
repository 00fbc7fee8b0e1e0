"""How a package is installed that a script imports: by another name, as a rule, in a few cases."""

from collections.abc import Sequence
from pathlib import Path

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


def how_to_install(names: Sequence[str], root: Path, others: Sequence[str] = ()) -> str:
    """Return what to do about packages that are missing here, all at once.

    Args:
        names: The names by which a script imports them.
        root: The folder of its repository.
        others: The names of those that it imports in some cases.
    """
    ask = _command(names)
    if others := [name for name in others if name not in names]:
        ask += f", or with all that it imports in some cases: {_command([*names, *others])}"
    return f"{ask}; or install all of {_LIST}" if (root / _LIST).is_file() else ask


def _command(names: Sequence[str]) -> str:
    return f"`pip install {' '.join(_NAME_ON_PYPI.get(name, name) for name in names)}`"
