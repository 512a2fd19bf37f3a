"""Distillation: a small model learns what a large one says.

divergences: forward, reverse and Jensen-Shannon between next-token distributions. buckets: a
distribution in its k likeliest tokens and the rest. hidden: hidden states through projections.
vocabulary: tokens that both know. objectives: what a step makes small. recorded: what a teacher
said, on disk. sampled: rows that the student writes itself. written: texts that the teacher writes.
student: a model made from its teacher. teachers: what a
teacher does before, as a command asks for it. settings: all of it by options.
"""
