"""Reinforcement learning: the model answers prompts, a function scores the answers, and a clipped
policy gradient trains on them.

prompts: prompts, scored answers, reward functions. losses: advantages, and the objective. answers:
the rows of a step. settings: the options. job: the training job. command: `jaxllm train rl`.
"""
