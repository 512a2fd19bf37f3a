"""Needle-in-a-haystack recall: a fact at some depth of a long text, asked for at its end.

texts: generator of texts. stories: word lists for the demo models. reading: chunked prefill under
an overflow policy, and scoring of answers. grid: runs all lengths, depths and policies. report:
tables and heat maps.
"""
