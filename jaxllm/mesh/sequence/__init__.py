"""Attention of texts that are split over devices: pure functions for the inside of `shard_map`.

order: zig-zag, in which causal attention is equal work for all. ring: keys and values go round,
queries stay; for prompts and training, with gradients. slots: queries of all over a cache whose
slots are split; for decoding. ulysses: every device has some heads of the whole text.
"""
