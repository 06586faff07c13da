"""Where files that can be made again are kept."""

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """`$TWOAXIS_CACHE`, else `~/.cache/twoaxis`, else None where there is no home folder."""
    given = os.environ.get("TWOAXIS_CACHE")
    if given:
        return Path(given)
    try:
        return Path("~/.cache/twoaxis").expanduser()
    except RuntimeError:
        return None
