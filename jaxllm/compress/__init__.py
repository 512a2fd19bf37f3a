"""Smaller models: ordered steps that each make parameters of parameters.

recipe: what a recipe says, and what a step is given. steps: the table of them. apply: one step
after the other. journal: what is finished, in files. report: what each step cost and brought.
picture: quality against bytes.

In rooms of their own: data (what is calibrated on), observe (ranges), matrices (what is done to one
matrix), layers (a text layer by layer), structure (heads, channels and layers as wholes), methods
(the functions of the table).
"""
