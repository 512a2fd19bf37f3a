"""Static quantization of inputs (W8A8): each linear's inputs have one calibrated scale.

weight: the weight type `static/int8`. observers, histograms: ranges of observed values. method: the
step `activations: static` of a recipe. qat: training with inputs on calibrated scales.
"""
