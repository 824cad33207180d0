"""
Trace files: records with the descriptions needed to print them elsewhere (``docs/reference/trace-file.md``).

::

    records ─► writer: batches ─► file of frames ─► FILE.dpt ─► reader ─► parser ─► blocks ─► columns ─► filter

* Records that are written together are a batch. If there is no room for it, its records are noted as lost, and its
  descriptions are written again later. A file is therefore readable after a full disk or a crash, and reports the
  number of missing records.
* The reader accepts bytes in pieces of any size. Conditions are evaluated on columns of many records; only selected
  records become objects. Files are identified by their inodes, not by their names.
"""
