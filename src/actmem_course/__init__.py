"""The course around the library: its figures, the helpers of its labs, and the judge of its exercises.

``actmem`` never imports this package. ``figures`` and ``others`` work without torch.
"""

import os

# On a GPU a collective overlaps with a matmul only if it starts first: one queue keeps the order of launches.
# CUDA reads this when it is first used, so it is set here, before any lab can use it, and handed on to the ranks.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
