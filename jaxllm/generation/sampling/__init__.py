"""Sampling: choosing the next token from the logits.

sampler: processor chains and the draw. truncation: processors that depend on the scores alone;
penalties, constraints: processors that depend on the text. parsers: values of options as arrays.
options: `make_sampler`. grammar_mask: processors of grammars.
"""
