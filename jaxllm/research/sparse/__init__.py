"""Sparse formats: a weight's zeros are left out of memory and files, and its products run without.

weight: the weight type (`bfloat16-2:4`, `int8-bitmap` and the like). speed: how fast processors
decode it.
"""
