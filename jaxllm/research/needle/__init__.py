"""Needle-in-a-haystack recall: a fact at some depth of a long text, asked for at its end.

haystack: generator of haystacks. prefill: chunked prefill under an overflow policy, and scoring of
answers. grid: runs all lengths, depths and policies; tables and heat maps.
"""
