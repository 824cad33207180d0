"""
Records as tables: Parquet files, and the views for SQL queries.

Records count as taken when they are in the journal of a Parquet directory, which is a trace file, and thus safe;
another process converts it to Parquet files. ``table_schema`` defines the columns.
"""
