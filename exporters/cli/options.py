"""Options that several commands share."""

from __future__ import annotations

import click

from modelport.gateway.cli.paths import EXISTING

seed_option = click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of the inputs."
)
model_version_option = click.option(
    "--model-version",
    default="auto",
    show_default=True,
    metavar="N|auto",
    help="Version to publish; auto: the next free one.",
)
public_key_option = click.option(
    "--public-key",
    type=EXISTING,
    metavar="PUBKEY",
    multiple=True,
    help="Require a signature by this Ed25519 key. Repeatable: any one of the keys.",
)
