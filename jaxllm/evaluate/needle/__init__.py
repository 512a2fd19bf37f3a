"""Needle-in-a-haystack recall: a fact at some depth of a long text, asked for at its end.

haystack: generator of haystack. stories: word lists for the demo models. prefill: chunked prefill
under an overflow policy, and scoring of answers. grid: runs all lengths, depths and policies.
report: tables and heat maps.
"""
