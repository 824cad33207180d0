"""The run of a program: parsing of its command line, execution, and following it to the end."""
