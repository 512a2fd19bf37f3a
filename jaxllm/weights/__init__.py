"""What a weight can be, how it multiplies, in which precision it is kept, and how it is filed.

linear: products with a weight of any kind; experts: with one each of a stack. leaves/: the kinds;
formats: their names. paths: parameters by dotted name and ordered rules. precision: formats by
path; quantize, dequantize. lazy: tensors that are read when wanted; later: weights that are; files:
safetensors, written in a stream; ahead: looked through for NaN by threads; reading: a parameter
from a file, by blocks; copies: whether several processes have the same.
"""
