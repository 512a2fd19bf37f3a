"""Pruning: weights that become zero, and parts of a model that are left out.

sparsity: shares and N:M patterns of zeros, and their masks. magnitude, wanda, sparsegpt: steps of
recipes. gradual: zeros that become more in training.

layer_pruning, structured_pruning: steps that drop layers, heads and channels. They share
parameter_groups, the parameters of heads and channels, and salience, their importance.
"""
