"""
Templates: how the data of a record is to be read, and what it says (docs/templates.md).

``template_parser`` reads template files. ``template_renderer`` makes text of a record's data for people, and
``data_extraction`` names and numbers for files and databases.
"""
