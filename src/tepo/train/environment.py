"""What is needed to repeat a run on another machine: versions, commit, command, seed, hardware."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "tepo", "torch", "transformers", "accelerate", "peft", "tokenizers", "safetensors", "math-verify", "reasoning-gym",
    "datasets", "numpy", "vllm",
)  # fmt: skip
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "WORLD_SIZE")
"""Environment variables that change how numbers are computed."""

ROUNDING = ("python", "packages", "cpu", "torch_threads", "gpus", "variables")
"""What may change the last bits of a result when it changes."""


def environment(seed: int) -> dict[str, Any]:
    """Plain values. seed: of the recipe; every random number of a run is derived from it."""
    import torch

    commit, changed = _commit()
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "folder": os.getcwd(),
        "seed": seed,
        "commit": commit,
        "uncommitted_changes": changed,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {package: _version(package) for package in PACKAGES},
        "cpu": _cpu(),
        "cpu_cores": os.cpu_count(),
        "memory_bytes": _memory(),
        "torch_threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def rounding_differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key: then, now` for what may change the last bits of a result."""
    return [
        f"{key}: {_show(before[key], now[key])} then, {_show(now[key], before[key])} now"
        for key in ROUNDING
        if key in before and before[key] != now[key]
    ]


def _show(value: Any, other: Any) -> Any:
    """Of a mapping the entries alone in which it differs."""
    if isinstance(value, dict) and isinstance(other, dict):
        return {key: value.get(key) for key in sorted(value.keys() | other.keys()) if value.get(key) != other.get(key)}
    return value


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> tuple[str | None, bool | None]:
    """The commit of the working copy that tepo runs from, and whether it was changed; None for an installed package."""
    folder = Path(__file__).resolve().parents[3]
    if not (folder / ".git").exists():
        return None, None
    commit, changes = (_git(folder, *words) for words in (("rev-parse", "HEAD"), ("status", "--porcelain")))
    return commit or None, None if changes is None else bool(changes)


def _git(folder: Path, *words: str) -> str | None:
    try:
        found = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False)
    except OSError:  # no git on this machine
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def _cpu() -> str:
    """The model of the processor, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
