"""``modelport sample``: seeded requests and the answers they must get, for load tests and gates.

Importing this imports neither torch nor a runtime, so that ``--help`` is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelport.exporters.cli.export import parse_kwargs
from modelport.exporters.progress import progress_bar
from modelport.gateway.cli.errors import OneLineCommand, UsageError, missing_extra

if TYPE_CHECKING:
    from modelport.exporters.source import Reference
    from modelport.exporters.spec import Sampler
    from modelport.gateway.types import ModelSignature

_FILE = click.Path(path_type=Path)


@click.command(cls=OneLineCommand)
@click.argument("path", type=_FILE)
@click.option(
    "--model",
    metavar="NAME|package.module:factory",
    help="What the checkpoint is of, as for 'modelport export'; not for a published version.",
)
@click.option("--model-kwargs", metavar="JSON", help="Hyper-parameters; win over the checkpoint's.")
@click.option("--max-batch-size", type=click.IntRange(1, 2**31 - 1), default=8, show_default=True)
@click.option("--count", type=click.IntRange(1), default=256, show_default=True, help="Requests.")
@click.option("--batch-size", type=click.IntRange(1), default=1, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "-o",
    "--output",
    type=_FILE,
    metavar="FILE.json",
    help="[default: samples.json in the published version, which its certificate then lists]",
)
@click.option(
    "--sign-key",
    type=_FILE,
    metavar="FILE",
    help="Sign the certificate of the published version again, with this Ed25519 key.",
)
@click.option("--quiet", "-q", is_flag=True, help="No progress.")
@click.option(
    "--trust",
    is_flag=True,
    help="Run what a published version holds, though it is native code or reaches files.",
)
def sample(
    path: Path,
    model: str | None,
    model_kwargs: str | None,
    output: Path | None,
    sign_key: Path | None,
    trust: bool,
    **options: Any,
) -> None:
    """Write seeded requests for the model at PATH, and the answers they must get.

    PATH is a checkpoint, whose own answers in eager mode are written, or a published version, or a
    model that has one, whose artifact is run by its own runtime. The file is what perf_analyzer
    takes as --input-data, and what the load tests take.

    Without --output the answers become the version's own, as 'modelport export' records them: for
    a version that an older modelport published. 'modelport gate' holds a version to them.

    Exit codes: 0 done, 2 usage, 4 unsupported, 5 integrity.
    """
    kwargs = parse_kwargs(model_kwargs)
    published = _is_published(path)
    if output is None and not published:
        raise UsageError(f"'{path}' is a checkpoint; say with --output where the file goes")
    if sign_key is not None and output is not None:
        raise UsageError("--sign-key signs a published version; leave --output")
    with progress_bar(options["quiet"]) as progress:
        progress("loading", 0, 0)
        try:
            from modelport.exporters import recording

            if published:
                if model is not None or kwargs:
                    raise UsageError(f"'{path}' is published; leave --model and --model-kwargs")
                signature, sampler, reference, atol, rtol = _published(path, trust)
            else:
                signature, sampler, reference, atol, rtol = _checkpoint(
                    path, model, kwargs, options["max_batch_size"]
                )
        except ImportError as error:
            raise missing_extra(error) from error
        if output is None:
            _add(path, signature, reference, (atol, rtol), sign_key, options["seed"])
            return
        asked = list(
            recording.requests(
                signature, sampler, options["count"], options["batch_size"], options["seed"]
            )
        )
        document = recording.record(
            signature,
            asked,
            reference,
            atol,
            rtol,
            lambda done, total: progress("asking the model", done, total),
        )
    recording.write(output, document)
    click.echo(f"{'requests':<10} {len(asked)} of {options['batch_size']} rows")
    click.echo(f"{'tolerance':<10} {atol:g} + {rtol:g} * |answer|")
    click.echo(f"{'path':<10} {output}")


def _add(
    path: Path,
    signature: ModelSignature,
    reference: Reference,
    tolerance: tuple[float, float],
    sign_key: Path | None,
    seed: int,
) -> None:
    """Record the answers in the version itself.

    Raises:
        UsageError: it has some; it is signed, and would no longer be.
    """
    from modelport.exporters import recording, verify
    from modelport.gateway.repository import signing

    version = verify.find_version(path)
    if (version / recording.FILENAME).exists():
        raise UsageError(
            f"'{version / recording.FILENAME}' is there already; --output writes another file"
        )
    key = None if sign_key is None else signing.load_private_key(sign_key)
    if key is None and signing.signer_of(version) is not None:
        raise UsageError(
            f"'{version}' is signed, and its certificate would change; give the key with "
            "--sign-key, or write a file of its own with --output"
        )
    samples = recording.record_version(version, signature, None, reference, tolerance, seed=seed)
    if samples is None:
        raise UsageError(
            f"one request of '{version.parent.name}' is larger than {recording.MOST_BYTES} bytes; "
            "write a file of its own with --output"
        )
    recording.add(version, samples, key)
    click.echo(f"{'requests':<10} {samples['requests']}")
    click.echo(f"{'tolerance':<10} {tolerance[0]:g} + {tolerance[1]:g} * |answer|")
    click.echo(f"{'path':<10} {version / recording.FILENAME}")


_Subject = tuple["ModelSignature", "Sampler | None", "Reference", float, float]


def _is_published(path: Path) -> bool:
    """Whether a model's or a version's folder lies there, or would."""
    places = (path, path.absolute().parent)
    return not path.is_file() and any((place / "config.pbtxt").is_file() for place in places)


def _checkpoint(
    path: Path, model: str | None, kwargs: dict[str, Any], max_batch_size: int
) -> _Subject:
    from modelport.exporters import sources
    from modelport.exporters.sources import SourceRequest

    source = sources.load(
        SourceRequest(path, model, model_kwargs=kwargs, max_batch_size=max_batch_size)
    )
    spec = source.spec
    return source.signature, spec.sample, source.reference, spec.atol, spec.rtol


def _published(path: Path, trusted: bool) -> _Subject:
    """Signature from ``config.pbtxt``, tolerance from the certificate, answers from the artifact.

    Raises:
        IntegrityError: its files are not as published.
    """
    from modelport.exporters import formats, verify
    from modelport.gateway.repository import config

    checked = verify.check(verify.find_version(path))
    document = checked.certificate.document
    row = formats.find_format(document["artifact"]["format"])
    session = row.open_session(checked.path / row.platform.default_filename, trusted)
    text = (checked.path.parent / config.FILENAME).read_text()
    signature = config.signature(config.complete(config.parse(text), checked.model))
    proven = document["parity"]["tolerance"]
    return signature, None, session, float(proven["atol"]), float(proven["rtol"])
