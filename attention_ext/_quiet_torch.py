"""Imports torch without its warning that there is no NumPy, which nothing here needs; of a NumPy that fails it still warns."""

import warnings

__all__ = ["torch"]

_before = list(warnings.filters)
warnings.filterwarnings("ignore", "Failed to initialize NumPy: No module named 'numpy'", UserWarning)
_own = [entry for entry in warnings.filters if entry not in _before]
try:
    import torch
finally:  # catch_warnings would take back the filters that torch adds as well
    warnings.filters = [entry for entry in warnings.filters if entry not in _own]
