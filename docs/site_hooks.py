"""What the site of the documentation has besides the pages of docs/.

mkdocs loads this file by `hooks` in mkdocs.yml. READMEs of the repository, of recipes and of the
rooms of the package become pages. A link to any other file outside of docs/ becomes its path.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
# The text of a link or picture, and a target that is neither a web address nor a place in the page.
_LINK = re.compile(
    r"(?P<mark>!?)\[(?P<text>[^\]]*)\]\((?P<target>(?!\w+:|#)[^)\s#]+)(?P<place>#[^)]*)?\)"
)
_CODE = re.compile(r"(`+[^`]*`+)")
_INDEX = re.compile(r"\] ?\[(\d+)\]")
_BOX = re.compile(r"^(\s*[-*]) \[ \] ", re.MULTILINE)


def _others() -> dict[str, str]:
    """Return the files outside of docs/ that become pages, with the names of these pages."""
    found = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md"}
    for name in ("CONTRIBUTING.md", "SECURITY.md"):
        if (ROOT / name).is_file():
            found[name] = name.lower()
    for folder in ("recipes", "tpuport"):
        for path in sorted((ROOT / folder).rglob("README.md")):
            name = path.relative_to(ROOT)
            found[name.as_posix()] = f"{'-'.join(name.parent.parts)}.md"
    if (ROOT / "tests/README.md").is_file():
        found["tests/README.md"] = "tests.md"
    return found


def on_files(files: Files, config: Any) -> Files:
    """Add the pages of other folders."""
    for source, name in _others().items():
        text = (ROOT / source).read_text(encoding="utf-8")
        page = File.generated(config, f"more/{name}", content=text)
        files.append(page)
    for path in sorted((ROOT / "recipes").glob("*/pictures/*")):
        name = f"more/pictures/{path.name}"
        if files.get_file_from_path(name) is not None:
            raise ValueError(f"two pictures of recipes have the name {path.name}")
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Lead links to the pages of the site, and show paths that are no pages as code."""
    del config
    others = _others()
    sources = {f"more/{name}": source for source, name in others.items()}
    here = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def led(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(here), match["target"]))
        if target in others:
            wanted = f"more/{others[target]}"
        elif target.startswith("docs/") and files.get_file_from_path(target[5:]) is not None:
            wanted = target[5:]
        elif match["mark"]:
            return match[0]  # those of recipes lie beside their pages
        elif (ROOT / target).exists():
            text = match["text"]
            return text if "`" in text else f"{text} (`{target}`)"
        else:
            raise ValueError(f"{here} links to {match['target']}, which is not there")
        link = posixpath.relpath(wanted, posixpath.dirname(page.file.src_uri) or ".")
        return f"{match['mark']}[{match['text']}]({link}{match['place'] or ''})"

    # Markdown takes a box before a link for a reference to it.
    return _outside_code(markdown, lambda text: _escaped(_LINK.sub(led, text)))


def _escaped(text: str) -> str:
    """Keep Markdown from taking a box before a link, or a second index, for a reference."""
    parts = _CODE.split(_BOX.sub(r"\1 ☐ ", text))
    return "".join(p if n % 2 else _INDEX.sub(r"]\[\1]", p) for n, p in enumerate(parts))


def _outside_code(markdown: str, change: Any) -> str:
    """Change what is not in a block of code."""
    parts = re.split(
        r"(^(?:```|~~~).*?^(?:```|~~~)[ ]*$)", markdown, flags=re.MULTILINE | re.DOTALL
    )
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))
