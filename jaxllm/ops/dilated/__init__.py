"""LongNet's dilated attention.

attention: new tokens over all parts, and a reference with all scores at once. blocks: consecutive
positions. gathered: arbitrary positions. pattern: the dilation pattern, and shared helpers.
"""
