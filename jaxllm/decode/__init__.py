"""Decoding algorithms: they see only the steps, never a model's inside.

sampling/: the choice of a token. loops/: whole generations. batching/: many texts at once. Each
room imports only from the rooms before it.
"""
