"""Context parallelism: attention of texts that are split over devices, for use inside `shard_map`.

order: zigzag order, in which causal attention is equal work for all devices. ring: ring attention,
for prompts and training, with gradients. slots: attention over a cache whose slots are sharded.
ulysses: exchanges tokens for heads. ways: selects one of these for a call. writing: writes new
entries to sharded slots. megatron: sequence parallelism of norms and residual sums.
"""
