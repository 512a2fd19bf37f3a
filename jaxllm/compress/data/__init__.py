"""What a model is calibrated on.

calibration: rows of tokens, and where they came from. cutting: how a text becomes rows. corpora:
WikiText as published.
"""
