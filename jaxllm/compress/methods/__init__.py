"""The functions of the table of steps.

formats: each matrix by itself. calibrated: by what a text makes of its inputs. activations: what
inputs are rounded to. experts: each by the tokens that are routed to it. walk: layer by layer,
those that a rule names. factoring: two thin matrices. smaller: fewer heads, channels, layers.
"""
