"""Binary log record: its layout, its encoding and decoding, and tables of many records."""
