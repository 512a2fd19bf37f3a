"""Many texts at once, each as if alone.

serve: requests that join and leave (requests: what they are); draws: their samplers; burst: several
tokens at a time. batch: tokens of any sequences, as llama.cpp takes them; plan: checks them.
places: the programs of both.
"""
