"""Compression methods: the math of a paper, its options, its function, and its row of the registry.

`compress.registry` lists them. They share some modules: observers and histograms find ranges of
inputs; ranks chooses ranks; parameter_groups has the parameters of heads and channels, salience
their importance.
"""
