"""Attention of other kinds than the dense one.

test_settings: the configuration and files.
"""
