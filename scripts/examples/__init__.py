"""Programs on the public API.

context_loop: text generation that edits its own cache, using attention weights.
context_heatmap: the heatmap that context_loop draws.
story_rewards: reinforcement learning of a task that a program can check.
"""
