"""Structured pruning of heads, channels and layers.

structure: removes them. salience: importance of heads and channels. influence: importance of
layers.
"""
