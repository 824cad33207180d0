"""
The language server for both languages: what an editor shows of a program while it is written (``dprobes lsp``).

Analysis, completions, explanations and definitions are functions of a text and a position, which know nothing of the
protocol; ``server.py`` alone does.
"""
