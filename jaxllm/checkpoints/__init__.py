"""Checkpoints on disk: where they are, our own format, and work that can be resumed.

resolve: a model's name or path as a directory. native: our own format. resume: a store of finished
tensors, from which an interrupted run continues. `jaxllm.convert.registry` lists all formats.
"""
