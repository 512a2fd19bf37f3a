"""The kinds of weights, a file each: arrays, integers with scales (`affine.py`: what they stand
for; `digits.py`: in bytes), those in groups of 16 (`fine.py`), packed bfloat16 in 12 bits, 4 bits
of NormalFloat (`nf4.py`), sparse ones, weights with their columns in another order (`ordered.py`),
with a number added to each group (`offset.py`), with inputs rounded on a grid found beforehand
(`static.py`), with adapters beside them (`adapted.py`; `wrapped.py` is what these share), and two
of low rank in place of one (`factored.py`). `parted.py`: shares of a weight on several devices, and
what they add up to; `owned.py`: whole experts on several devices; `scattered.py`: parts that are
gathered in use.

`leaf.py` says what a leaf and a format of leaves are; `formats.py`, beside this folder, has a row
for each. Another kind is a file here and its row there; with native kernels, `Matrix` for them.
"""
