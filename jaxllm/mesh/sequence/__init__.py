"""Attention of texts that are split over devices: pure functions for the inside of `shard_map`.

order: zig-zag, in which causal attention is equal work for all. ring: keys and values go round,
queries stay; for prompts and training, with gradients. slots: queries come to a cache whose slots
are split. ulysses: tokens are exchanged for heads. ways: what of these a call of a model takes.
writing: new entries into split slots. megatron: norms and sums of some tokens beside tensor
parallelism.
"""
