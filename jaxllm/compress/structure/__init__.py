"""Heads, channels and layers as wholes.

structure: cutting them away. salience: what a head or a channel counts for. influence: what a layer
does to the stream.
"""
