"""GPU kernels that map a model's KV blocks into a sibling's. Tensors in, tensors out.

One folder per operation: ``reference.py`` defines it in float64 torch, ``kernel.py`` holds only
Triton code, ``__init__.py`` is the wrapper with every check, allocation and grid. Importing this
package imports neither torch nor Triton.
"""
