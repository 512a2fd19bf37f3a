"""Many texts at once, each as if alone.

serve: requests that join and leave; draws: their samplers. batch: tokens of any sequences, as
llama.cpp takes them; plan: checks them. places: the programs of both.
"""
