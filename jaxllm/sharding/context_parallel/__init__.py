"""Context parallelism: attention of texts that are split over devices, for use inside `shard_map`.

zigzag: an order of tokens in which causal attention is equal work for all devices. ring: ring
attention, for prompts and training, with gradients. split_cache: attention over a cache whose slots
are sharded. ulysses: exchanges tokens for heads. dispatch: selects one of these for a call, and
writes new entries to sharded slots. sequence_parallel: norms and residual sums of split tokens.
"""
