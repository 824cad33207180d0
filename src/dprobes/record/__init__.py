"""The binary log record: its layout, written once, its encoding and decoding, and tables of many records."""
