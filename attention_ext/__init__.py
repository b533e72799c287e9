"""Exact scaled dot-product attention on Tensor Cores where PyTorch has no good kernel.

Importing this package registers torch.ops.attention_ext.*; attention_ext.sdpa documents the operator.
"""

import pkgutil

# Python started in the folder of the sources finds this file without the compiled libraries: look where installed too.
__path__ = pkgutil.extend_path(__path__, __name__)

from . import _libraries
from . import _registration as _registration
from ._partials import merge_partials
from .ops import Explanation, explain, preferred, sdpa, sdpa_with_lse

__all__ = ["Explanation", "__version__", "explain", "merge_partials", "preferred", "sdpa", "sdpa_with_lse"]

__version__ = _libraries.BUILD.version
