"""From the source tree to the typed tree: names and types, and the errors of programs without a meaning."""
