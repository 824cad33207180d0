"""The output of commands: records, tables, summaries, listings."""
