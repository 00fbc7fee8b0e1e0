"""Bytes of a file to Python source, or a reason in one line why there is none."""

import io
import tokenize
from dataclasses import dataclass

from tpuport.lint.notebooks import Notebook, NotPythonError, read_notebook
from tpuport.lint.records import Trouble

MAX_MEGABYTES = 5
_MAX_BYTES = MAX_MEGABYTES * 1024 * 1024
# Pictures in a notebook's outputs are no code.
_MAX_NOTEBOOK_BYTES = 20 * _MAX_BYTES


class UnreadableError(Exception):
    """A file that is not linted.

    Args:
        reason: Why not, in one line.
        trouble: Whose fault that is.
    """

    def __init__(self, reason: str, trouble: Trouble = Trouble.UNREAD) -> None:
        super().__init__(reason)
        self.reason = reason
        self.trouble = trouble


@dataclass(frozen=True)
class Source:
    """The text of a file.

    Attributes:
        text: Python: of a notebook all its code cells.
        encoding: What to encode it with to write it back; `utf-8-sig` where the file has a mark.
        notebook: The notebook that it comes from.
        raw: The text of the file itself.
    """

    text: str
    encoding: str
    raw: str
    notebook: Notebook | None = None


def read_source(data: bytes, name: str) -> Source:
    """The source in a file's bytes.

    Args:
        data: The whole file.
        name: Its name, whose end says whether it is a notebook.

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
