"""Programs on the public API.

context_loop: makes a text while it culls and repairs the cache by what was attended to.
context_heatmap: the picture that context_loop draws.
"""
