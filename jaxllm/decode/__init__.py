"""Decoding algorithms: they see only the steps, never a model's inside."""
