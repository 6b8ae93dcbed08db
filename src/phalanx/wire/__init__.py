"""Bytes and their meaning. No I/O: every byte sequence can be tested."""
