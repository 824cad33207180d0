"""
Language server for both languages: information for an editor about an unfinished program (``dprobes lsp``).

Analysis, completions, explanations and definitions are functions of a text and a position, independent of the protocol.
Only ``language_server.py`` implements the protocol.
"""
