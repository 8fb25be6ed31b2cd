"""Attention and cache kernels: tensors in, tensors out. Import the submodules; this package itself holds nothing."""
