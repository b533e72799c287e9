"""Where things lie in the repository, and how processes that tests start find them."""

import os
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parent.parent
CSRC = ROOT / "csrc"


def importing(*folders: Path) -> dict[str, str]:
    """The environment in which a process imports from these folders and this one as well."""
    paths = [*folders, SUPPORT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
