"""Programs of Debian's and npm's packages, installed or unpacked when they are first needed."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

from modelport.loadtests.system.environments import ROOT, Missing, failure_of, folder, run


def npm_package(name: str, version: str) -> Path:
    """The folder of an unpacked npm package, for programs that are distributed by npm."""
    home = folder("npm") / f"{name.strip('@').replace('/', '-')}-{version}"
    if not (home / "package").is_dir():
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        if shutil.which("npm") is None:
            debian_program("npm", "npm")
        if error := failure_of(["npm", "pack", f"{name}@{version}"], home):
            raise Missing(f"npm pack {name}@{version} failed: {error}")
        for archive in home.glob("*.tgz"):
            with tarfile.open(archive) as file:
                file.extractall(home, filter="data")
            archive.unlink()
    return home / "package"


def debian_library(package: str) -> Path:
    """The folder of a Debian package's shared libraries, unpacked but not installed."""
    home = folder("debian") / package
    if not any(home.rglob("*.so*")):
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        if failure_of(["apt-get", "download", package], home):
            if os.geteuid() == 0:
                failure_of(["apt-get", "update"], home)
            if error := failure_of(["apt-get", "download", package], home):
                raise Missing(f"apt-get download {package} failed (apt-get update run?): {error}")
        for archive in home.glob("*.deb"):
            run(["dpkg", "-x", str(archive), str(home)])
    return next(home.rglob("*.so*")).parent


def debian_program(name: str, package: str) -> str:
    """The path of a program, installed by apt if it is missing and the user may do so."""
    if found := shutil.which(name):
        return found
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Missing(f"{name} is missing: install the Debian package {package}")
    failure_of(["apt-get", "update"], ROOT)
    run(["apt-get", "install", "-y", "--no-install-recommends", package])
    found = shutil.which(name)
    if found is None:
        raise Missing(f"the Debian package {package} brought no {name}")
    return found
