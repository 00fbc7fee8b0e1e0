"""Which files a run takes: ignore files, excludes, links, names, patterns."""

import os
from pathlib import Path

import pytest

from tpuport.foundation.errors import UsageError
from tpuport.lint.files import DEFAULT_EXCLUDE, find_files
from tpuport.lint.settings import Settings

EMPTY = ""


def found(*paths: str, **settings) -> list[str]:
    """What these paths lead to, relative to the current folder."""
    force = settings.pop("force_exclude", False)
    result = find_files(paths or ["."], Settings(root=Path.cwd(), **settings), force_exclude=force)
    return [os.path.relpath(path) for path in result.files]


def problems(*paths: str) -> list[str]:
    result = find_files(paths or ["."], Settings(root=Path.cwd()))
    return [str(problem) for problem in result.problems]


def test_folders_give_python_files_and_notebooks_in_order(project):
    project({"b.py": EMPTY, "a/z.py": EMPTY, "a/n.ipynb": "{}", "a/x.txt": EMPTY, "a/y.pyc": EMPTY})
    assert found() == ["a/n.ipynb", "a/z.py", "b.py"]


def test_a_file_given_twice_counts_once(project):
    project({"a.py": EMPTY})
    assert found("a.py", ".", "./a.py", os.path.abspath("a.py")) == ["a.py"]


@pytest.mark.parametrize("name", ["node_modules", ".venv", "build", "dist", "__pycache__"])
def test_the_usual_folders_are_left_out(project, name: str):
    assert name in DEFAULT_EXCLUDE
    project({f"{name}/a.py": EMPTY, f"deep/{name}/b.py": EMPTY, "c.py": EMPTY})
    assert found() == ["c.py"]


def test_an_excluded_folder_is_taken_when_it_is_named(project):
    project({"build/a.py": EMPTY, "build/__pycache__/b.py": EMPTY, "build/dist/c.py": EMPTY})
    assert found("build") == ["build/a.py"]


def test_an_excluded_file_is_taken_when_it_is_named_unless_forced(project):
    project({"build/a.py": EMPTY, "b.py": EMPTY})
    assert found("build/a.py", "b.py") == ["b.py", "build/a.py"]
    assert found("build/a.py", "b.py", force_exclude=True) == ["b.py"]


def test_exclude_replaces_the_usual_folders_and_extend_exclude_adds(project):
    project({"build/a.py": EMPTY, "gen/b.py": EMPTY, "c.py": EMPTY, "c_test.py": EMPTY})
    assert found(exclude=("gen",)) == ["build/a.py", "c.py", "c_test.py"]
    assert found(extend_exclude=("gen", "*_test.py")) == ["c.py"]
    assert found(exclude=(), extend_exclude=()) == ["build/a.py", "c.py", "c_test.py", "gen/b.py"]
    assert found(extend_exclude=("/gen/*", "!/gen/b.py")) == ["c.py", "c_test.py", "gen/b.py"]


# .gitignore.


def test_gitignore_is_honoured_with_negation(project):
    project({".gitignore": "*.py\n!keep_*.py\n", "a.py": EMPTY, "keep_b.py": EMPTY})
    assert found() == ["keep_b.py"]


def test_the_innermost_gitignore_has_the_last_word(project):
    project(
        {
            ".gitignore": "gen_*.py\n/only_here.py\n",
            "sub/.gitignore": "!gen_a.py\nlocal.py\n",
            "gen_a.py": EMPTY,
            "only_here.py": EMPTY,
            "local.py": EMPTY,
            "sub/gen_a.py": EMPTY,
            "sub/gen_b.py": EMPTY,
            "sub/local.py": EMPTY,
            "sub/only_here.py": EMPTY,
        }
    )
    assert found() == ["local.py", "sub/gen_a.py", "sub/only_here.py"]


def test_a_gitignore_above_the_folder_counts_up_to_the_repository(project):
    root = project({".gitignore": "x.py\nwhole/\n", "sub/x.py": EMPTY, "sub/y.py": EMPTY})
    (root.parent / ".gitignore").write_text("y.py\n")
    assert found("sub") == ["sub/y.py"]


def test_an_ignored_folder_is_taken_when_it_is_named(project):
    project({".gitignore": "out/\nx.py\n", "out/a.py": EMPTY, "out/x.py": EMPTY, "b.py": EMPTY})
    assert found() == ["b.py"]
    assert found("out") == ["out/a.py", "out/x.py"]


def test_the_exclude_file_of_the_repository_counts(project):
    root = project({"a.py": EMPTY, "b.py": EMPTY})
    (root / ".git/info").mkdir()
    (root / ".git/info/exclude").write_text("a.py\n")
    assert found() == ["b.py"]


def test_a_gitignore_without_a_repository_counts_in_its_folder(project):
    root = project({"sub/.gitignore": "a.py\n", "sub/a.py": EMPTY, "sub/b.py": EMPTY})
    (root / ".git").rmdir()
    assert found() == ["sub/b.py"]


def test_a_gitignore_that_is_no_text_ignores_what_can_be_read(project):
    project({".gitignore": b"\xff\xfe\na.py\n", "a.py": EMPTY, "b.py": EMPTY})
    assert found() == ["b.py"]


# Links and what is no file.


def test_a_loop_of_links_is_reported_and_the_rest_taken(project):
    root = project({"a/b/c.py": EMPTY})
    (root / "a/b/up").symlink_to(root / "a")
    (root / "a/self").symlink_to(root / "a/self")
    assert found() == ["a/b/c.py"]
    assert problems() == ["a/b/up: a link to a folder around it, not followed"]


def test_a_linked_folder_is_followed_once_and_files_go_by_their_own_place(project):
    root = project({"z/a.py": EMPTY})
    (root.parent / "elsewhere").mkdir()
    (root.parent / "elsewhere/e.py").touch()
    (root / "a_link").symlink_to(root / "z")
    (root / "b_link").symlink_to(root / "z")
    (root / "out").symlink_to(root.parent / "elsewhere")
    assert found() == ["out/e.py", "z/a.py"]
    assert problems() == []


def test_links_out_of_a_folder_can_be_left_alone(project):
    root = project({"z/a.py": EMPTY})
    (root.parent / "elsewhere").mkdir()
    (root.parent / "elsewhere/e.py").touch()
    (root / "out").symlink_to(root.parent / "elsewhere")
    (root / "root").symlink_to("/")
    (root / "e.py").symlink_to(root.parent / "elsewhere/e.py")
    (root / "b_link").symlink_to(root / "z")
    result = find_files(["."], Settings(root=Path.cwd()), inside=root)
    assert [path.as_posix() for path in result.files] == ["z/a.py"]
    assert sorted(str(problem).partition(":")[0] for problem in result.problems) == [
        *("e.py", "out", "root")
    ]


def test_links_that_fan_out_end(project):
    root = project({"d0/a.py": EMPTY})
    for number in range(1, 40):
        folder = root / f"d{number}"
        folder.mkdir()
        (folder / "x").symlink_to(root / f"d{number - 1}")
        (folder / "y").symlink_to(root / f"d{number - 1}")
    assert found("d39") == ["d39/" + "x/" * 39 + "a.py"]


def test_a_broken_link_is_taken_so_that_the_run_reports_it(project):
    root = project()
    (root / "gone.py").symlink_to(root / "nowhere.py")
    assert found() == ["gone.py"]


def test_a_pipe_is_no_file(project):
    root = project()
    os.mkfifo(root / "pipe.py")
    assert found() == []
    assert problems("pipe.py") == ["pipe.py: not a regular file"]


def test_a_folder_that_cannot_be_read_is_reported(project, monkeypatch):
    project({"a.py": EMPTY, "shut/b.py": EMPTY})
    scandir = os.scandir

    def refuse(path):
        # Whoever runs the tests may be allowed to read everything.
        if Path(path).name == "shut":
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert found() == ["a.py"]
    assert problems() == ["shut: cannot be read: Permission denied"]


# Names and patterns.


def test_a_pattern_is_expanded(project):
    project({"a/model_x.py": EMPTY, "a/b/model_y.py": EMPTY, "a/data.py": EMPTY, "a/m.txt": EMPTY})
    assert found("a/**/model_*.py") == ["a/b/model_y.py", "a/model_x.py"]
    assert found("a/*") == ["a/data.py", "a/model_x.py"]


def test_a_file_with_any_ending_is_taken_when_it_is_named(project):
    project({"script": EMPTY})
    assert found("script") == ["script"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nope.py", "There is no file or folder nope.py."),
        ("nope/*.py", "Nothing to lint matches nope/*.py."),
        ("*.txt", "Nothing to lint matches [*].txt."),
    ],
)
def test_a_path_that_leads_nowhere_is_a_wrong_call(project, path: str, message: str):
    project({"a.txt": EMPTY})
    with pytest.raises(UsageError, match=message.replace(".", r"\.").replace("/*", "/[*]")):
        found(path)
