"""Settings shared by all tests: one torch thread, no hypothesis deadlines, helpers importable as ``tests.…``."""

from __future__ import annotations

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent.parent))

settings.register_profile("leadout", deadline=None, print_blob=True)
settings.load_profile("leadout")

try:
    import torch
except ImportError:  # the router's packages are tested without torch
    pass
else:
    torch.set_num_threads(1)
