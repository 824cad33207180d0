"""
Records as tables: Parquet files, and the views for SQL queries.

Records survive a crash once they are in the journal of a Parquet directory, which is a trace file. Another process
converts the journal to Parquet files. ``table_schema`` defines the columns.
"""
