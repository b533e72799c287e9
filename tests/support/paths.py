"""Where things lie in the repository."""

from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parent.parent
CSRC = ROOT / "csrc"
