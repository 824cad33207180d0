"""
The RPN probe language: text to ``Program`` and back, static checks, and the byte encoding.

Only the language lives here. What instructions do is in ``vm``; what modules and symbols are is in ``target``.
"""
