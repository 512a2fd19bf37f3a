"""Observers: find the range of values that integers should cover.

statistics: min-max, moving average and grid search. histograms: the histogram observer. qparams:
scale and zero point of a range, and rounding with them.
"""
