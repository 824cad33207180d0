"""The binary log record: its layout, written once, and its encoding and decoding."""
