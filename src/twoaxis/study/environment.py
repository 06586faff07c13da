"""What the numbers of a comparison were measured with."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

import twoaxis


def environment() -> dict[str, Any]:
    """Versions, threads and the kind of processor; no names of machines or people and no paths."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = accelerator.type if accelerator else "none"
    return {
        "twoaxis": twoaxis.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "threads": torch.get_num_threads(),
        "accelerator": torch.cuda.get_device_name() if kind == "cuda" else kind,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"
