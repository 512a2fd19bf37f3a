"""The configuration that all families share.

model: `ModelConfig`, rotary settings and activations. long_attention: settings of attention that is
not dense.
"""
