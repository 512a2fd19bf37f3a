"""Layerwise calibration.

layerwise: the loop over layers, and the inputs of a layer and of its linears. input_stats:
statistics of a linear's inputs. expert_inputs: the inputs of each expert. channel_scaling: channel
scales moved from activations to weights (SmoothQuant, AWQ).
"""
