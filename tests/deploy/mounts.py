"""Files as Kubernetes mounts Secrets and ConfigMaps, with the link that it replaces."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def mount(folder: Path, version: str, files: Mapping[str, bytes], mode: int = 0o440) -> None:
    """Write the files to a folder of their own, and make the link ``..data`` lead to it."""
    (folder / f"..{version}").mkdir(parents=True)
    for name, content in files.items():
        (folder / f"..{version}" / name).write_bytes(content)
        (folder / f"..{version}" / name).chmod(mode)
    link = folder / "..data_tmp"
    link.symlink_to(f"..{version}")
    link.rename(folder / "..data")
    for name in files:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
