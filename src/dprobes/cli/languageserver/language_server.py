"""
The language server protocol: requests of an editor, answered by functions of this package.

It needs pygls, an extra.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from lsprotocol import types
from pygls.lsp.server import LanguageServer

from dprobes.cli.languageserver.edited_program import Analysis, analyse
from dprobes.cli.languageserver.editor_completion import CompletionKind, completions_at
from dprobes.cli.languageserver.explanation import explain
from dprobes.cli.languageserver.name_definition import definition_of, source_at, source_of_name
from dprobes.diagnostics import Severity
from dprobes.version import __version__

if TYPE_CHECKING:
    from pygls.workspace import TextDocument

    from dprobes.diagnostics import Diagnostic, Note
    from dprobes.source_text import Span

__all__ = ["create_server"]

_SEVERITIES = {
    Severity.ERROR: types.DiagnosticSeverity.Error,
    Severity.WARNING: types.DiagnosticSeverity.Warning,
    Severity.NOTE: types.DiagnosticSeverity.Information,
}
_KINDS = {
    CompletionKind.MODULE: types.CompletionItemKind.Module,
    CompletionKind.FUNCTION: types.CompletionItemKind.Function,
    CompletionKind.FIELD: types.CompletionItemKind.Field,
    CompletionKind.VARIABLE: types.CompletionItemKind.Variable,
    CompletionKind.KEYWORD: types.CompletionItemKind.Keyword,
    CompletionKind.EVENT: types.CompletionItemKind.Event,
}


class _Server(LanguageServer):
    """A language server with the last analysis of each document."""

    def __init__(self) -> None:
        super().__init__("dprobes", __version__)
        self.analyses: dict[str, tuple[int | None, Analysis]] = {}

    def analysed(self, uri: str) -> tuple[TextDocument, Analysis]:
        """Return the open document with this URI, and the analysis of its current contents, which is cached."""
        document = self.workspace.get_text_document(uri)
        known = self.analyses.get(uri)
        if known is None or known[0] != document.version or known[1].source.text != document.source:
            known = (document.version, analyse(_path(uri), document.source))
            self.analyses[uri] = known
        return document, known[1]

    def publish(self, uri: str) -> None:
        """Analyse the document with this URI, and send its diagnostics to the editor."""
        document, analysis = self.analysed(uri)
        found = [_diagnostic(document, analysis, each) for each in analysis.diagnostics]
        self.text_document_publish_diagnostics(
            types.PublishDiagnosticsParams(uri=uri, version=document.version, diagnostics=found)
        )


def create_server() -> LanguageServer:
    """Return a server; ``start_io`` runs it on standard input and output."""
    server = _Server()

    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def opened(parameters: types.DidOpenTextDocumentParams) -> None:
        server.publish(parameters.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def changed(parameters: types.DidChangeTextDocumentParams) -> None:
        server.publish(parameters.text_document.uri)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def closed(parameters: types.DidCloseTextDocumentParams) -> None:
        server.analyses.pop(parameters.text_document.uri, None)

    @server.feature(
        types.TEXT_DOCUMENT_COMPLETION, types.CompletionOptions(trigger_characters=[":", "@", ".", ">", " ", '"'])
    )
    def completed(parameters: types.CompletionParams) -> list[types.CompletionItem]:
        document = server.workspace.get_text_document(parameters.text_document.uri)
        offset = document.offset_at_position(parameters.position)
        found = completions_at(_path(document.uri), document.source, offset)
        return [
            types.CompletionItem(
                label=each.text,
                kind=_KINDS[each.kind],
                detail=each.doc or None,
                text_edit=types.TextEdit(_range(document, each.start, offset), each.text),
            )
            for each in found
        ]

    @server.feature(types.TEXT_DOCUMENT_HOVER)
    def hovered(parameters: types.HoverParams) -> types.Hover | None:
        document, analysis = server.analysed(parameters.text_document.uri)
        said = explain(analysis, document.offset_at_position(parameters.position))
        if said is None:
            return None
        text, start, end = said
        return types.Hover(types.MarkupContent(types.MarkupKind.Markdown, text), _range(document, start, end))

    @server.feature(types.TEXT_DOCUMENT_DEFINITION)
    def defined(parameters: types.DefinitionParams) -> types.Location | None:
        document, analysis = server.analysed(parameters.text_document.uri)
        offset = document.offset_at_position(parameters.position)
        if (source := source_at(analysis, offset)) is not None:
            start = types.Position(source.line - 1, 0)
            return types.Location(source.path.as_uri(), types.Range(start, start))
        found = definition_of(analysis.source.name, document.source, offset)
        if found is not None:
            return types.Location(document.uri, _range(document, found.start, found.end))
        if (source := source_of_name(analysis.source.name, document.source, offset)) is not None:
            start = types.Position(source.line - 1, 0)
            return types.Location(source.path.as_uri(), types.Range(start, start))
        return None

    return server


def _path(uri: str) -> str:
    """Return the path of a document; for a document without a file its URI."""
    parts = urlparse(uri)
    return unquote(parts.path) if parts.scheme == "file" else uri


def _diagnostic(document: TextDocument, analysis: Analysis, found: Diagnostic) -> types.Diagnostic:
    message = found.message + (f"\nhint: {found.hint}" if found.hint else "")
    return types.Diagnostic(
        range=_place(document, analysis, found.span),
        message=message,
        severity=_SEVERITIES[found.severity],
        source="dprobes",
        related_information=[
            types.DiagnosticRelatedInformation(
                types.Location(_uri(document, analysis, note), _place(document, analysis, note.span)), note.message
            )
            for note in found.notes
        ],
    )


def _uri(document: TextDocument, analysis: Analysis, note: Note) -> str:
    if note.span is None or note.span.file is analysis.source:
        return str(document.uri)
    return Path(note.span.file.name).absolute().as_uri()


def _place(document: TextDocument, analysis: Analysis, span: Span | None) -> types.Range:
    """Return the range of a span; a span in an included file is shown at the beginning of the document."""
    if span is None or span.file is not analysis.source:
        return _range(document, 0, 0)
    return _range(document, span.start, max(span.end, span.start + 1))


def _range(document: TextDocument, start: int, end: int) -> types.Range:
    """Return a range in the editor's units, which depend on its encoding."""
    text = document.source
    places = []
    for offset in (start, min(end, len(text))):
        line = text.count("\n", 0, offset)
        column = offset - (text.rfind("\n", 0, offset) + 1)
        places.append(types.Position(line, column))
    found = types.Range(*places)
    return document.position_codec.range_to_client_units(document.lines, found)
