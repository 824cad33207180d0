"""
Records as tables: Parquet files, and the views that SQL queries see.

Records are safe, and count as taken, when they are in the journal of a Parquet directory, which is a trace file;
another process converts it to Parquet files. ``table_schema`` defines the columns.
"""
