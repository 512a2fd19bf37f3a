"""LongNet's dilated attention.

attention: new tokens over all parts; blocks: consecutive positions; gathered: arbitrary positions.
pattern: the dilation pattern, and shared helpers. dense: a reference with all scores at once.
"""
