"""Complete generation loops, each compiled over `jaxllm.steps`.

finish: finish reasons and token budgets; capacity: capacity checks. generate: generation and
streaming; state: the loop's state, one step, and the loop; pipelined: the loop for a pipelined
model; overflow: eviction policies for a full cache; streaming_prefill: prefill through a small
cache in models with a memory. speculative: speculative decoding; prompt_lookup: drafts by prompt
lookup; rejection_sampling: rejection sampling. beam, contrastive: other searches. guidance:
classifier-free guidance.
"""
