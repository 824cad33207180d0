"""What commands print: records, tables, summaries, listings."""
