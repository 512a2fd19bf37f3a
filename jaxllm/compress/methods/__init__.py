"""Compression methods: the math of a paper, its options, its function, and its row of the registry.

`compress.registry` lists them. They share parameter_groups, the parameters of heads and channels,
and salience, their importance.
"""
