"""What the course needs around the library: results, figures, benchmarks, the judge.

``actmem`` never imports this package.  ``results`` and ``show`` work without torch.
"""

import os

# On a GPU a collective overlaps with a matmul only if it starts first: one queue keeps the order of launches.
# CUDA reads this when it is first used, so it is set here, before any lab can use it, and handed on to the ranks.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
