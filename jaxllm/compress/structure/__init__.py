"""Structured pruning of heads, channels and layers.

structure: removes them. importance: importance of heads and channels. block_influence: importance
of layers.
"""
