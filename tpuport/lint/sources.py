"""Decoding of a file's bytes to Python source, or a reason in one line why it has none."""

import io
import tokenize
from dataclasses import dataclass

from tpuport.lint.notebooks import Notebook, NotPythonError, read_notebook
from tpuport.lint.records import Trouble

MAX_MEGABYTES = 5
_MAX_BYTES = MAX_MEGABYTES * 1024 * 1024
# Most of a large notebook is images in its outputs, which are not linted.
_MAX_NOTEBOOK_BYTES = 20 * _MAX_BYTES


class UnreadableError(Exception):
    """Raised for a file that is not linted.

    Args:
        reason: The reason, in one line.
        trouble: The kind of reason.
    """

    def __init__(self, reason: str, trouble: Trouble = Trouble.UNREAD) -> None:
        super().__init__(reason)
        self.reason = reason
        self.trouble = trouble


@dataclass(frozen=True)
class Source:
    """The text of a file.

    Attributes:
        text: The Python source; all code cells of a notebook.
        encoding: The encoding to write it back with; `utf-8-sig` if the file has a byte-order mark.
        notebook: The notebook that it comes from.
        raw: The text of the file itself.
    """

    text: str
    encoding: str
    raw: str
    notebook: Notebook | None = None


def read_source(data: bytes, name: str) -> Source:
    """Decode the source in a file's bytes.

    Args:
        data: The content of the file.
        name: Its name, whose suffix tells whether it is a notebook.

    Raises:
        UnreadableError: it is binary, too large, in another encoding than it says, or no notebook.
    """
    if name.endswith(".ipynb"):
        return _read_notebook(data)
    if len(data) > _MAX_BYTES:
        raise UnreadableError(f"larger than {MAX_MEGABYTES} MB, so it is not linted")
    if b"\0" in data:
        raise UnreadableError("binary: it has null bytes, which Python source cannot have")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        raise UnreadableError(_encoding_error(error, data)) from None
    text = _decode(data, encoding)
    return Source(text, encoding, text)


def _read_notebook(data: bytes) -> Source:
    if len(data) > _MAX_NOTEBOOK_BYTES:
        raise UnreadableError(f"larger than {20 * MAX_MEGABYTES} MB, so it is not linted")
    text = _decode(data, "utf-8-sig" if data.startswith(b"\xef\xbb\xbf") else "utf-8")
    try:
        notebook = read_notebook(text)
    except NotPythonError as error:
        raise UnreadableError(str(error), Trouble.SKIPPED) from None
    except ValueError as error:
        raise UnreadableError(str(error)) from None
    except RecursionError:
        raise UnreadableError("no notebook: its JSON is nested too deeply") from None
    return Source(notebook.text, "utf-8", text, notebook)


def _decode(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise UnreadableError(
            f"not {encoding}: line {line} has bytes that it does not allow"
        ) from None
    except LookupError:
        raise UnreadableError(f"its encoding {encoding} is no encoding of text") from None


def _encoding_error(error: SyntaxError, data: bytes) -> str:
    message = str(error.msg)
    if message.startswith("invalid or missing encoding"):
        _decode(data, "utf-8")
    return message
