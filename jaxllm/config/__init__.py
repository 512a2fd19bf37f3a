"""The configuration that all families share.

model: `ModelConfig`, rotary settings and activations. attention_kind: kinds of attention that other
packages bring.
"""
