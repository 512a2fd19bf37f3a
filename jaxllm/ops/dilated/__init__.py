"""LongNet's dilated attention.

attention: new tokens over all parts; blocks: a run of positions; gathered: tokens that stand
anywhere. sight: what a dilation shows, and what these share. dense: the same, all scores at once.
"""
