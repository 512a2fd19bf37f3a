"""Layerwise calibration.

stream: the loop over layers, and the inputs of a layer and of its linears. moments: statistics of a
linear's inputs. routed: the inputs of each expert. scaling: channel scales moved from activations
to weights (SmoothQuant, AWQ).
"""
