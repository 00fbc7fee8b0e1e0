"""A language server: findings of lint in an editor, their fixes, and the pages of rules."""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lsprotocol import types
from pygls import uris
from pygls.lsp.server import LanguageServer
from pygls.workspace import TextDocument

from tpuport.foundation.errors import UsageError
from tpuport.foundation.version import __version__
from tpuport.lint.records import Reported
from tpuport.lint.settings import Settings
from tpuport.rules._discovery import find_rules
from tpuport.servers.buffers import all_fixed, edits, findings_of, fixed, settings_of, summary
from tpuport.source.rewrite.finding import Severity

# Keys that are pressed within this time are linted together.
_PAUSE_S = 0.005
_SEVERITIES = {
    Severity.ERROR: types.DiagnosticSeverity.Error,
    Severity.SILENT: types.DiagnosticSeverity.Error,
    Severity.SLOW: types.DiagnosticSeverity.Warning,
    Severity.DEVICE: types.DiagnosticSeverity.Information,
    Severity.NOTE: types.DiagnosticSeverity.Hint,
}
_FIX_ALL = "source.fixAll.tpuport"


@dataclass(frozen=True)
class _Linted:
    """What was found in one version of a document."""

    version: int | None
    findings: Sequence[Reported]


class LintServer(LanguageServer):
    """The server, with what it found in each open document."""

    def __init__(self) -> None:
        super().__init__("tpuport", __version__)
        self.linted: dict[str, _Linted] = {}

    def lint(self, uri: str) -> None:
        """Lint a document as the editor has it, and publish what is found."""
        document = self.workspace.get_text_document(uri)
        path = _path(document)
        found = findings_of(document.source, path, self.settings(path))
        self.linted[uri] = _Linted(document.version, found)
        diagnostics = [_diagnostic(finding, document) for finding in found]
        self.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(uri, diagnostics, document.version)
        )

    def settings(self, path: Path) -> Settings:
        """Return the configuration for a file; the defaults, with a message, if it is wrong."""
        try:
            return settings_of(path)
        except UsageError as error:
            self.window_log_message(
                types.LogMessageParams(types.MessageType.Warning, f"tpuport: {error}")
            )
            return Settings(path.parent)

    def at(self, uri: str, where: types.Range) -> list[tuple[Reported, types.Diagnostic]]:
        """Return the findings of a document that touch a range."""
        document = self.workspace.get_text_document(uri)
        linted = self.linted.get(uri)
        if linted is None or linted.version != document.version:
            self.lint(uri)
            linted = self.linted[uri]
        pairs = [(finding, _diagnostic(finding, document)) for finding in linted.findings]
        return [pair for pair in pairs if _touch(pair[1].range, where)]


def server() -> LintServer:
    """Return a server; `start_io` runs it on standard input and output."""
    made = LintServer()
    find_rules()
    # The rules stay loaded: looking through them for garbage takes a fifth of the time of a lint.
    gc.freeze()

    @made.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def opened(ls: LintServer, params: types.DidOpenTextDocumentParams) -> None:
        ls.lint(params.text_document.uri)

    @made.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    async def changed(ls: LintServer, params: types.DidChangeTextDocumentParams) -> None:
        uri, version = params.text_document.uri, params.text_document.version
        await asyncio.sleep(_PAUSE_S)
        # A later change or the end of the document makes this one needless.
        open_now = ls.workspace.text_documents.get(uri)
        if open_now is not None and open_now.version == version:
            ls.lint(uri)

    @made.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def closed(ls: LintServer, params: types.DidCloseTextDocumentParams) -> None:
        uri = params.text_document.uri
        ls.linted.pop(uri, None)
        ls.text_document_publish_diagnostics(types.PublishDiagnosticsParams(uri, []))

    kinds = [types.CodeActionKind.QuickFix, _FIX_ALL]

    @made.feature(types.TEXT_DOCUMENT_CODE_ACTION, types.CodeActionOptions(code_action_kinds=kinds))
    def actions(ls: LintServer, params: types.CodeActionParams) -> list[types.CodeAction]:
        return _actions(ls, params)

    @made.feature(types.TEXT_DOCUMENT_HOVER)
    def hover(ls: LintServer, params: types.HoverParams) -> types.Hover | None:
        where = types.Range(params.position, params.position)
        found = ls.at(params.text_document.uri, where)
        if not found:
            return None
        codes = dict.fromkeys(finding.code for finding, _ in found)
        text = "\n\n---\n\n".join(summary(code) for code in codes)
        content = types.MarkupContent(types.MarkupKind.Markdown, text)
        return types.Hover(content, found[0][1].range)

    return made


def _actions(ls: LintServer, params: types.CodeActionParams) -> list[types.CodeAction]:
    uri, only = params.text_document.uri, params.context.only
    document = ls.workspace.get_text_document(uri)
    path, before = _path(document), document.source

    def action(title: str, kind: str, after: str | None) -> list[types.CodeAction]:
        if after is None:
            return []
        changes = [
            types.TextEdit(
                types.Range(types.Position(e.first, 0), types.Position(e.last, 0)), e.text
            )
            for e in edits(before, after)
        ]
        return [types.CodeAction(title, kind=kind, edit=types.WorkspaceEdit({uri: changes}))]

    def wants(kind: str) -> bool:
        return only is None or any(kind == one or kind.startswith(f"{one}.") for one in only)

    found: list[types.CodeAction] = []
    if wants(types.CodeActionKind.QuickFix):
        for finding, diagnostic in ls.at(uri, params.range):
            title = f"{finding.code}: rewrite"
            made = action(title, types.CodeActionKind.QuickFix, fixed(before, path, finding))
            for one in made:
                one.diagnostics = [diagnostic]
            found += made
    if only is not None and wants(_FIX_ALL):
        found += action(
            "tpuport: all fixes that are proved",
            _FIX_ALL,
            all_fixed(before, path, ls.settings(path)),
        )
    return found


def _path(document: TextDocument) -> Path:
    found = uris.to_fs_path(document.uri)
    return Path(found or "untitled.py")


def _diagnostic(finding: Reported, document: TextDocument) -> types.Diagnostic:
    where = types.Range(
        types.Position(finding.line - 1, finding.column),
        types.Position(finding.end_line - 1, finding.end_column),
    )
    return types.Diagnostic(
        document.position_codec.range_to_client_units(document.lines, where),
        finding.message,
        severity=_SEVERITIES[finding.severity],
        code=finding.code,
        source="tpuport",
    )


def _touch(one: types.Range, other: types.Range) -> bool:
    return one.start <= other.end and other.start <= one.end
