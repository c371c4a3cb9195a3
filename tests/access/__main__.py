"""``make access``: the proofs of TLS and access that take minutes."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests import models
from tests.access import jwks_faults
from tests.access.certificate_swap import LoadDuringSwaps, MountedSecret, swap
from tests.certificates import TestAuthority
from tests.server import serving

SWAPS = 100
REQUESTS_PER_SECOND = 500
#: The part of that rate that has to be reached.
LEAST_RATE = 0.98
ISSUER_SECONDS = 30.0
LONGEST_PAUSE_SECONDS = 0.01
#: From the moment in which the new files are in place.
SERVED_WITHIN_SECONDS = 1.0


def certificate_swaps(folder: Path) -> bool:
    """Replace the certificate 100 times under 500 requests/s; nothing may fail."""
    secret = MountedSecret(folder, TestAuthority())
    with serving(models.repository(folder / "repository"), *secret.flags) as gateway:
        load = LoadDuringSwaps(gateway, secret, REQUESTS_PER_SECOND)
        longest = asyncio.run(swap(load, SWAPS))
    rate = load.requests / load.seconds
    print(
        f"certificate swaps: {SWAPS}, the new serial after at most {longest:.2f} s; "
        f"{load.requests} requests, {rate:.0f} a second, {load.connections} HTTP connections, "
        f"{len(load.errors)} errors"
    )
    for error in sorted(set(load.errors))[:5]:
        print(f"  {error}")
    is_loaded = rate >= LEAST_RATE * REQUESTS_PER_SECOND
    return is_loaded and not load.errors and longest <= SERVED_WITHIN_SECONDS


def issuer_faults(folder: Path) -> bool:
    """Rotate and break an issuer's keys under load; no decision is wrong, and nothing stalls.

    A fault that stalls the event loop does so in every part of the time. A pause in few of them is
    the machine's: time that the host of a virtual machine takes counts as processor time.
    """
    good, bad = jwks_faults.compare(folder, ISSUER_SECONDS)
    for name, outcome in (("a good issuer", good), ("a bad issuer", bad)):
        print(
            f"{name}: {outcome.requests} requests, {len(outcome.wrong)} wrong decisions, "
            f"{outcome.fetches} fetches, longest pause {outcome.longest_pause * 1000:.1f} ms "
            f"(median of {jwks_faults.PARTS} parts; once {max(outcome.longest_pauses) * 1000:.1f})"
        )
    for wrong in sorted({*good.wrong, *bad.wrong})[:5]:
        print(f"  {wrong}")
    return not good.wrong and not bad.wrong and bad.longest_pause <= LONGEST_PAUSE_SECONDS


PROOFS: tuple[Callable[[Path], bool], ...] = (certificate_swaps, issuer_faults)


def main() -> int:
    names = [proof.__name__ for proof in PROOFS]
    parser = argparse.ArgumentParser(prog="make access", description=__doc__)
    parser.add_argument("proofs", nargs="*", choices=[[], *names], metavar="PROOF", default=[])
    chosen = parser.parse_args().proofs or names
    failed = []
    for proof in PROOFS:
        if proof.__name__ in chosen:
            with tempfile.TemporaryDirectory() as folder:
                if not proof(Path(folder)):
                    failed.append(proof.__name__)
    for name in failed:
        print(f"FAILED: {name}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
