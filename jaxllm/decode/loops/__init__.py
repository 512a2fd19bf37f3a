"""Whole generations, each a compiled loop over steps.

text: what all loops do with theirs. generate: the loop, and the stream; overflow: when a text
outgrows its cache. beam, speculative, contrastive: other searches. guidance: away from a negative
prompt.
"""
