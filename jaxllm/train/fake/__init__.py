"""Quantization-aware training: weights that multiply as the integers that they will become.

One function chooses the integers everywhere (`Integer.make`, or `codes` and `of` where the scales
are learned), and the product is that of the `QTensor` itself. So the logits of what `convert` makes
are those of training, bit for bit.

gradient: the slope that rounding is given. leaf: the weight. prepare: parameters to and fro.
job: the training as a `Job`.
"""
