"""Whole generations, each a compiled loop over steps.

text: what all loops do with theirs; room: whether it fits. generate: a whole text, and a stream;
state: where its rows stand, a step of it, and the loop; rounds: that loop by a model in stages;
overflow: when a text outgrows its cache; endless: read through a small one, where a memory is.
speculative: with drafts, which lookup takes from the text itself, and of which acceptance says how
many stand. beam, contrastive: other searches. guidance: away from a negative prompt.
"""
