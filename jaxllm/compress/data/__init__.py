"""Calibration data.

calibration: rows of tokens, and their source. cutting: cuts a text into rows. corpora: reads
WikiText as published.
"""
