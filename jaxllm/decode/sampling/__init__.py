"""Sampling: choosing the next token from the logits.

sampler: processor chains and the draw. truncation: processors that depend on the scores alone;
penalties, constraints: processors that depend on the text. Each of these files ends with its table
of user options. readers: parsers of option values. options: the combined table and `make_sampler`.
spellings: names of options in other libraries.
"""
