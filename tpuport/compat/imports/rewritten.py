"""Files rewritten by the safe rules, compiled, and kept on disk from one run to the next."""

import base64
import binascii
import hashlib
import marshal
import os
import sys
import threading
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any

from tpuport.foundation.reporting.json_codec import decoded, encoded
from tpuport.lint.cache import Cache

# Part of every cache key: raise it when this file changes what is kept or how it is made.
_FORMAT = "import 2"
# Inside `porting` the shims and the emulated device answer code about CUDA and process groups.
_ANSWERED = "TPU5"
_LOCK = threading.RLock()


@dataclass(frozen=True)
class Rewritten:
    """The result of rewriting a file.

    Attributes:
        code: The module's code, which says the user's file and lines; None where the file is to be
            imported unchanged.
        text: The text that the code was compiled from.
        origins: For each line of the text the line of the user's file that it comes from.
        applied: The fixes, each as its rule's code and its line.
        left: Findings that stay, each as its rule's code, its line and the reason.
        reason: Why the file could not be rewritten at all; empty where it could.
    """

    code: CodeType | None = None
    text: str = ""
    origins: tuple[int, ...] = ()
    applied: tuple[tuple[str, int], ...] = ()
    left: tuple[tuple[str, int, str], ...] = ()
    reason: str = ""


def default_cache_dir() -> Path:
    """Return the user's folder for rewritten files, which keeps them out of checkouts."""
    base = os.environ.get("XDG_CACHE_HOME")
    # As the XDG base directory specification has it: a path that is not absolute is ignored.
    home = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return home / "tpuport" / "imports"


def rewritten(data: bytes, path: str, cache: Cache) -> Rewritten:
    """Rewrite a file by the safe rules, or return the kept result of doing so.

    Args:
        data: The content of the file.
        path: The path of the file. Tracebacks show it, and its name and folders tell
            whether it is code that the host runs.
        cache: The cache of results, as Python keeps bytecode.

    Returns:
        The result, also for a file that is not Python or that the rules cannot treat.
    """
    digest = hashlib.sha256(data).hexdigest()
    key = cache.key(_FORMAT, path, digest, str(sys.flags.optimize))
    kept = _from_json(cache.get(key))
    if kept is not None:
        return kept
    from tpuport.lint.run import FileFailure, attempt

    # Warnings are silenced for the entire process, so two threads would undo each other.
    with _LOCK, warnings.catch_warnings():
        # The compiler tells the user once, when the original is compiled.
        warnings.simplefilter("ignore")
        answer = attempt(_attempted, data, path, {})
    if isinstance(answer, FileFailure):
        return Rewritten(reason=answer.reason)
    cache.put(key, _to_json(answer))
    return answer


def _attempted(data: bytes, path: str, options: Mapping[str, Any]) -> Rewritten:
    from tpuport.lint.sources import UnreadableError
    from tpuport.source.rewrite.rewriter import NotSettledError

    del options
    try:
        return _run_rules(data, path)
    except UnreadableError as error:
        return Rewritten(reason=error.reason)
    except SyntaxError as error:
        return Rewritten(reason=f"no Python: {error.msg}")
    except (RecursionError, MemoryError):
        return Rewritten(reason="nested too deeply to be rewritten")
    except NotSettledError as error:
        return Rewritten(reason=str(error))


def _run_rules(data: bytes, path: str) -> Rewritten:
    from tpuport.lint.check import tail
    from tpuport.lint.fixing import ignored_by_comments
    from tpuport.lint.sources import read_source
    from tpuport.rules._discovery import find_rules
    from tpuport.source.inference.inference import StaticKinds
    from tpuport.source.rewrite import codegen
    from tpuport.source.rewrite.matching import normal_line_breaks
    from tpuport.source.rewrite.rewriter import Session
    from tpuport.source.syntax.text import SourceText

    rules = [rule for rule in find_rules() if not rule.CODE.startswith(_ANSWERED)]
    session = Session(
        [rule() for rule in rules],
        StaticKinds(),
        file=tail(Path(path)),
        ignored=ignored_by_comments,
    )
    text = session.run(SourceText(normal_line_breaks(read_source(data, path).text)))
    applied = tuple((fix.code, fix.line) for fix in session.applied)
    left = tuple((item.finding.code, item.finding.line, item.reason) for item in session.left)
    if not applied:
        return Rewritten(left=left)
    code = codegen.compile_module(text, path)
    return Rewritten(code, text.text, text.origins, applied, left)


def _to_json(made: Rewritten) -> dict[str, Any]:
    code = None if made.code is None else base64.b64encode(marshal.dumps(made.code)).decode()
    return encoded(made) | {"code": code}


def _from_json(kept: Any) -> Rewritten | None:
    """Return a kept result, or None if there is none that can be read.

    Bytecode is loaded as Python loads that of its own cache: from a folder of the user's, made by
    this very version of Python, which is part of the folder's name, and with its check sum intact.
    """
    if kept is None:
        return None
    try:
        code = kept["code"]
        if code is not None:
            code = marshal.loads(base64.b64decode(code, validate=True))
        return decoded(Rewritten, {**kept, "code": code})
    except (KeyError, TypeError, ValueError, EOFError, binascii.Error):
        return None
