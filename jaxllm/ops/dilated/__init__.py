"""LongNet's dilated attention.

attention: new tokens over all parts; blocks: a run of positions; gathered: tokens that stand
anywhere. sight: what these share. dilation: what a dilation shows, and the same densely.
"""
