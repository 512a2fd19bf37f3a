"""Observers: find the range of values that integers should cover.

observers: min-max, moving average and grid search. histograms: the histogram observer. ranges:
scale and zero point of a range, and rounding with them.
"""
