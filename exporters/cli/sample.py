"""``modelport sample``: seeded requests and their expected answers, for load tests and gates.

This module imports neither torch nor a runtime, which keeps ``--help`` fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from modelport.exporters.cli.export import parse_kwargs
from modelport.exporters.options import SEED
from modelport.exporters.runtime.file_errors import writing_to
from modelport.exporters.runtime.interruption import InterruptibleCommand
from modelport.gateway.cli.paths import EXISTING, WRITTEN, ExistingRepository
from modelport.gateway.errors import UsageError
from modelport.gateway.extras import missing_extra
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.runtime.progress import progress_bar

if TYPE_CHECKING:
    from modelport.exporters.loaded_model import Reference
    from modelport.exporters.model_spec import Sampler
    from modelport.gateway.types import ModelSignature

#: A model's signature, its generator of requests, its answers, ``atol`` and ``rtol``.
_Subject = tuple["ModelSignature", "Sampler", "Reference", float, float]


@click.command(cls=InterruptibleCommand)
@click.argument("path", type=ExistingRepository())
@click.option(
    "--model",
    metavar="NAME|package.module:factory",
    help="The checkpoint's model, as for 'modelport export'; not for a published version.",
)
@click.option(
    "--model-kwargs", metavar="JSON", help="Hyper-parameters; they override the checkpoint's."
)
@click.option(
    "--max-batch-size",
    type=click.IntRange(0, 2**31 - 1),
    default=8,
    show_default=True,
    help="Maximum batch size of a checkpoint's model; 0: no batch dimension.",
)
@click.option(
    "--count", type=click.IntRange(1), default=256, show_default=True, help="Number of requests."
)
@click.option(
    "--batch-size", type=click.IntRange(1), default=1, show_default=True, help="Rows of a request."
)
@SEED.named("seed", int)
@click.option(
    "-o",
    "--output",
    type=WRITTEN,
    metavar="FILE.json",
    help="File to write.  [default: samples.json in the published version and its certificate]",
)
@click.option(
    "--sign-key",
    type=EXISTING,
    metavar="FILE",
    help="Sign the published version's certificate again with this Ed25519 key.",
)
@click.option("--quiet", "-q", is_flag=True, help="Do not show progress.")
@click.option(
    "--trust",
    is_flag=True,
    help="Run the artifact even if it is native code or accesses files.",
)
def sample(
    path: Path | Location,
    model: str | None,
    model_kwargs: str | None,
    output: Path | None,
    sign_key: Path | None,
    trust: bool,
    **options: Any,
) -> None:
    """Write seeded requests for the model at PATH, and their expected answers.

    PATH is a checkpoint, a published version, or a model (its newest version); these also as s3://,
    gs:// or az://BUCKET/PREFIX/MODEL[/VERSION], with --output. A checkpoint answers in eager mode;
    a version's artifact answers in its runtime. perf_analyzer takes the file as --input-data, and
    'modelport loadtest' as --data.

    Without --output the answers become part of the version, as 'modelport export' records them.
    Use this for a version published by an older modelport. 'modelport gate' compares with them.

    Exit codes: 0 done, 2 usage, 4 unsupported, 5 integrity.
    """
    kwargs = parse_kwargs(model_kwargs)
    if isinstance(path, Location):
        if output is None:
            raise UsageError(f"'{path}' is never changed; name the file to write with --output")
        from modelport.exporters.publishing import download

        path = click.get_current_context().with_resource(download.copied(path))
    # Whether ``path`` is, or would be, the folder of a model or of a version.
    places = (path, path.absolute().parent)
    published = not path.is_file() and any((place / "config.pbtxt").is_file() for place in places)
    if output is None and not published:
        raise UsageError(f"'{path}' is a checkpoint; name the file to write with --output")
    if sign_key is not None and output is not None:
        raise UsageError("--sign-key signs a published version; omit --output")
    with progress_bar(options["quiet"]) as progress:
        progress("loading", 0, 0)
        try:
            from modelport.exporters.requests import sample_requests

            if published:
                if model is not None or kwargs:
                    raise UsageError(f"'{path}' is published; omit --model and --model-kwargs")
                subject = _published(path, trust)
            else:
                subject = _checkpoint(path, model, kwargs, options["max_batch_size"])
        except ImportError as error:
            raise missing_extra(error) from error
        if output is None:
            with writing_to(path, "give --output"):
                _add(path, subject, sign_key, options["seed"])
            return
        signature, sampler, reference, atol, rtol = subject
        asked = list(
            sample_requests.requests(
                signature, sampler, options["count"], options["batch_size"], options["seed"]
            )
        )
        document = sample_requests.record(
            signature,
            asked,
            reference,
            atol,
            rtol,
            lambda done, total: progress("running the model", done, total),
        )
    with writing_to(output, "choose another --output"):
        sample_requests.write(output, document)
    click.echo(f"{'requests':<10} {len(asked)} of {options['batch_size']} rows")
    click.echo(f"{'tolerance':<10} {atol:g} + {rtol:g} * |answer|")
    click.echo(f"{'path':<10} {output}")


def _add(path: Path, subject: _Subject, sign_key: Path | None, seed: int) -> None:
    """Record the answers in the version itself.

    Raises:
        UsageError: the version has answers already, or its signature would become invalid.
    """
    from modelport.exporters.proof import verify
    from modelport.exporters.requests import sample_requests
    from modelport.gateway.repository import signing, signing_keys

    version = verify.find_version(path)
    if (version / sample_requests.FILENAME).exists():
        raise UsageError(
            f"'{version / sample_requests.FILENAME}' exists; --output writes another file"
        )
    key = None if sign_key is None else signing_keys.load_private_key(sign_key)
    if key is None and signing.signer_of(version) is not None:
        raise UsageError(
            f"'{version}' is signed, and its certificate would change; give the key with "
            "--sign-key, or write a file of its own with --output"
        )
    signature, sampler, reference, *tolerance = subject
    samples = sample_requests.record_version(
        version, signature, sampler, reference, (tolerance[0], tolerance[1]), seed=seed
    )
    if samples is None:
        raise UsageError(
            f"one request of '{version.parent.name}' is larger than "
            f"{sample_requests.MOST_BYTES} bytes; write a file of its own with --output"
        )
    sample_requests.add(version, samples, key)
    click.echo(f"{'requests':<10} {samples['requests']}")
    click.echo(f"{'tolerance':<10} {tolerance[0]:g} + {tolerance[1]:g} * |answer|")
    click.echo(f"{'path':<10} {version / sample_requests.FILENAME}")


def _checkpoint(
    path: Path, model: str | None, kwargs: dict[str, Any], max_batch_size: int
) -> _Subject:
    from modelport.exporters.requests.random_inputs import unpadded_sampler
    from modelport.exporters.sources import SourceRequest, reader_selection

    source = reader_selection.load(
        SourceRequest(path, model, model_kwargs=kwargs, max_batch_size=max_batch_size)
    )
    spec = source.spec
    return source.signature, unpadded_sampler(spec), source.reference, spec.atol, spec.rtol


def _published(path: Path, trusted: bool) -> _Subject:
    """Read the signature, the tolerance and the answers of a published version.

    They come from ``config.pbtxt``, the certificate and the artifact.

    Raises:
        IntegrityError: its files were changed.
    """
    from modelport.exporters.formats.registry import find_format
    from modelport.exporters.model_spec import ModelSpec
    from modelport.exporters.proof import certificate, verify
    from modelport.exporters.requests.random_inputs import unpadded_sampler
    from modelport.gateway.repository import config, untrusted_files

    checked = verify.check(verify.find_version(path))
    document = checked.certificate.document
    row = find_format(document["artifact"]["format"])
    session = row.open_session(checked.path / row.platform.default_filename, trusted)
    text = untrusted_files.read_text(
        checked.path.parent / config.FILENAME, untrusted_files.MAX_CONFIG_BYTES
    )
    signature = config.signature(config.complete(config.parse(text), checked.model))
    proven = document["parity"]["tolerance"]
    spec = ModelSpec(checked.model, lambda *_: signature, masks=certificate.masks(document))
    sampler = unpadded_sampler(spec)
    return signature, sampler, session, float(proven["atol"]), float(proven["rtol"])
