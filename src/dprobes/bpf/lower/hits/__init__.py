"""The code before and after a handler at a hit: the decision whether it runs, and the output of its record."""
