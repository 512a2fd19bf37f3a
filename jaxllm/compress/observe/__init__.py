"""Ranges that integers cover.

observers: what is remembered of a stream to find one. histograms: the one that remembers more than
two numbers. ranges: the grid of a range, and numbers on it.
"""
