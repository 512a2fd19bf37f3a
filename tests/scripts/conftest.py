"""Scripts are no package: their directory is put on the path here, as running one of them would."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]
