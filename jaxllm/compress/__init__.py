"""Smaller models: ordered steps that each make parameters of parameters.

recipe: what a recipe says, and what a step is given. steps: the table of them. formats: the steps
that change the format of each matrix by itself. journal: what is finished, in files.
"""
