"""The helpers beside these tests (servers, workers) are modules of no package."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
