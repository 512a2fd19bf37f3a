"""Sampling: choosing the next token from the logits.

sampler: processor chains and the draw. truncation: processors that depend on the scores alone;
penalties, constraints: processors that depend on the text. Each of these files ends with its table
of user options. parsers: parsers of option values. options: the combined table and `make_sampler`.
aliases: names of options in other libraries.
"""
