"""Records as tables: Parquet files, and the views that SQL queries see."""
