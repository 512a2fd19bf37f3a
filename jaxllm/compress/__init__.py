"""Models made smaller with the help of calibration data.

calibration: rows of tokens to run a model on; cutting: how a text becomes rows; corpora: WikiText
as published. observers: what is remembered of a stream to find its range; histograms: the one that
remembers more than two numbers; ranges: the integers that cover a range.
"""
