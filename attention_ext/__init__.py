"""Exact scaled dot-product attention, and linear layers in float32, on Tensor Cores where PyTorch has no good kernel.

Importing this package registers torch.ops.attention_ext.*; attention_ext.sdpa, linear_float32 and linear_batchnorm_softmax document
the operators, nn has the modules.
"""

import pkgutil

# Python started in the folder of the sources finds this file without the compiled libraries: look where installed too.
__path__ = pkgutil.extend_path(__path__, __name__)

from . import _libraries, nn
from . import _registration as _registration
from ._redirect import override
from .attention.partials import merge_partials
from .ops import Explanation, explain, linear_batchnorm_softmax, linear_float32, preferred, sdpa, sdpa_with_lse

__all__ = [
    "Explanation",
    "__version__",
    "explain",
    "linear_batchnorm_softmax",
    "linear_float32",
    "merge_partials",
    "nn",
    "override",
    "preferred",
    "sdpa",
    "sdpa_with_lse",
]

__version__ = _libraries.BUILD.version
