"""Compression methods: the math of a paper, its options, its function, and its row of the registry.

`compress.registry` lists them.
"""
