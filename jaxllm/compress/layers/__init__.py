"""A text layer by layer.

stream: what comes into a layer, and what its linears see. moments: sums over a linear's inputs.
routed: what each expert of a mixture sees.
scaling: scales taken out of what makes an input and put into its weights (SmoothQuant, AWQ).
"""
