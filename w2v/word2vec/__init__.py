"""Word2vec: batches of a text, gradients of their rows, and the step.

reference.py   plain torch on any device: the specification that the others are tested against
cpu.py         numba loops on all CPU cores
cuda.py        CUDA kernels, compiled by CuPy
"""
