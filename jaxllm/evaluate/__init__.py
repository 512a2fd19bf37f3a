"""What a model computes, and what a change to it costs; three rooms that do not know each
other.

receptive: what of a text reaches which token? equivalence/: does it compute the same as another?
likelihood/: how likely does it find a text? recall/: what does it still know of a long one?
"""
