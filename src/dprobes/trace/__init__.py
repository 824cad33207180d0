"""
Trace files: records with what is needed to show them elsewhere (``docs/tracefile.md``).

::

    records ─► writer: batches ─► file of frames ─► FILE.dpt ─► reader ─► parser ─► blocks ─► columns ─► filter

* Records that are written together are a batch. If it finds no room, its records are noted as lost, and its
  descriptions are written again later. So a file that was hit by a full disk or a crash can be read, and tells what is
  missing.
* The reader takes bytes in pieces of any size. Conditions are evaluated on columns of many records; only selected
  records become objects. Files are identified by their inodes, not by their names.
"""
