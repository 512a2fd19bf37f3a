"""Token merging: neighboring old tokens of a cache share one slot.

pool: the operation on a cache. policies: policies for a full cache (`generate --overflow pooled`).
"""
