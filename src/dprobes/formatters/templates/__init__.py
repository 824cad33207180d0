"""
Templates: the layout and the textual form of a record's data (docs/reference/templates.md).

``template_parser`` reads template files, and ``template_lines`` their lines. ``template_renderer`` converts a record's
data to readable text, and ``data_extraction`` to named values for files and databases.
"""
