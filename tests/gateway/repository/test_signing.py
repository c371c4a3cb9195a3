"""``certificate.json.sig``: whoever lacks the private key cannot change a version unnoticed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from modelport.gateway.errors import IntegrityError, Internal, InvalidArgument
from modelport.gateway.repository import manifest, signing, signing_keys
from modelport.gateway.repository.signing_keys import PrivateKey, PublicKey

PEM = serialization.Encoding.PEM
PKCS8 = serialization.PrivateFormat.PKCS8
SPKI = serialization.PublicFormat.SubjectPublicKeyInfo
PLAIN = serialization.NoEncryption()
CONTENT = bytes(range(256)) * 4


@pytest.fixture(scope="module")
def key() -> PrivateKey:
    return PrivateKey.generate()


def certify(version: Path, model: str = "m") -> None:
    files = [name for name in manifest.files_of(version) if name not in signing.UNLISTED]
    artifact = {
        "size_bytes": sum((version / name).stat().st_size for name in files),
        "files": {name: {"sha256": manifest.sha256_of(version / name)} for name in files},
    }
    certificate = {"model": {"name": model}, "artifact": artifact}
    (version / signing.CERTIFICATE).write_text(json.dumps(certificate))


@pytest.fixture
def version(tmp_path: Path, key: PrivateKey) -> Path:
    """A signed version of model ``m``."""
    folder = tmp_path / "m" / "1"
    (folder / "variables").mkdir(parents=True)
    (folder / "model.onnx").write_bytes(CONTENT)
    (folder / "variables" / "weights.bin").write_bytes(b"weights")
    certify(folder)
    signing.sign(folder, key)
    manifest.write(folder)
    return folder


def verify(version: Path, *keys: PublicKey, model: str = "m") -> None:
    """Both ways of checking agree."""
    outcomes: list[str] = []
    for check in (_in_place, _copied):
        try:
            check(version, keys, model)
            outcomes.append("")
        except IntegrityError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    if outcomes[0]:
        raise IntegrityError(outcomes[0])


def _in_place(version: Path, keys: tuple[PublicKey, ...], model: str) -> None:
    signing.verify_files(version, signing.verify_signature(version, model, keys))


def _copied(version: Path, keys: tuple[PublicKey, ...], model: str) -> None:
    with signing.verified_copy(version, signing.verify_signature(version, model, keys)) as copy:
        found = {name: (copy / name).read_bytes() for name in manifest.files_of(copy)}
    assert found == {
        name: (version / name).read_bytes()
        for name in manifest.files_of(version)
        if name not in signing.UNLISTED
    }


def refused(version: Path, *keys: PublicKey, model: str = "m") -> str:
    with pytest.raises(IntegrityError) as caught:
        verify(version, *keys, model=model)
    return str(caught.value)


# -- keys -----------------------------------------------------------------------------------------


def test_signatures_are_those_of_rfc_8032() -> None:
    """Its section 7.1, test 2."""
    seed = "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb"
    key = PrivateKey(bytes.fromhex(seed))
    assert key.public.raw.hex() == (
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c"
    )
    assert key.sign(b"\x72").hex() == (
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
    )


def test_the_fingerprint_is_the_sha_256_of_the_subject_public_key_info(key: PrivateKey) -> None:
    public = ed25519.Ed25519PublicKey.from_public_bytes(key.public.raw)
    der = public.public_bytes(serialization.Encoding.DER, SPKI)
    assert key.public.fingerprint == hashlib.sha256(der).hexdigest()


def test_keys_survive_their_files(key: PrivateKey, tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(key.pem())
    (tmp_path / "pub").write_bytes(key.public.pem())
    assert signing_keys.load_private_key(tmp_path / "key") == key
    assert signing_keys.load_public_key(tmp_path / "pub") == key.public


def test_a_private_key_does_not_show_itself(key: PrivateKey) -> None:
    assert repr(key) == "PrivateKey()"


RSA = rsa.generate_private_key(65537, 2048)
EC = ec.generate_private_key(ec.SECP256R1())
OURS = ed25519.Ed25519PrivateKey.generate()
SECRET = serialization.BestAvailableEncryption(b"secret")
TRADITIONAL = serialization.PrivateFormat.TraditionalOpenSSL

BAD_KEYS: dict[str, tuple[bytes, str, str]] = {  # content, as a private key, as a public one
    "empty": (b"", "not a key in PEM", "not a key in PEM"),
    "text": (b"hello\n", "not a key in PEM", "not a key in PEM"),
    "not-utf-8": (b"\xff\xfe\x00" * 9, "not a key in PEM", "not a key in PEM"),
    "damaged": (OURS.private_bytes(PEM, PKCS8, PLAIN)[:60], "not a key in PEM", "is a private key"),
    "huge": (b"x" * (signing_keys.MAX_KEY_BYTES + 1), "not a key in PEM", "not a key in PEM"),
    "private": (OURS.private_bytes(PEM, PKCS8, PLAIN), "", "is a private key"),
    "public": (OURS.public_key().public_bytes(PEM, SPKI), "is a public key", ""),
    "encrypted": (OURS.private_bytes(PEM, PKCS8, SECRET), "is encrypted", "is a private key"),
    "encrypted-rsa": (
        RSA.private_bytes(PEM, TRADITIONAL, SECRET), "is encrypted", "is a private key",
    ),
    "rsa": (RSA.private_bytes(PEM, PKCS8, PLAIN), "not an Ed25519 key", "is a private key"),
    "rsa-public": (
        RSA.public_key().public_bytes(PEM, SPKI), "is a public key", "not an Ed25519 key",
    ),
    "ec": (EC.private_bytes(PEM, PKCS8, PLAIN), "not an Ed25519 key", "is a private key"),
    "a certificate": (
        b"-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n",
        "not a key in PEM", "not a key in PEM",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_KEYS)
def test_a_file_that_holds_another_kind_of_key_is_refused(name: str, tmp_path: Path) -> None:
    content, *reasons = BAD_KEYS[name]
    (tmp_path / "file").write_bytes(content)
    loaders: list[Callable[[Path], object]] = [
        signing_keys.load_private_key,
        signing_keys.load_public_key,
    ]
    for load, reason in zip(loaders, reasons, strict=True):
        if reason:
            with pytest.raises(InvalidArgument, match=reason) as caught:
                load(tmp_path / "file")
            assert "\n" not in str(caught.value)
            assert str(tmp_path / "file") in str(caught.value)
        else:
            load(tmp_path / "file")


@pytest.mark.parametrize("load", [signing_keys.load_private_key, signing_keys.load_public_key])
def test_a_key_that_cannot_be_read_is_refused(
    load: Callable[[Path], object], tmp_path: Path
) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "nowhere", "No such file")):
        with pytest.raises(InvalidArgument, match=reason):
            load(path)


def test_cryptography_is_not_imported_before_something_is_signed_or_verified() -> None:
    code = (
        "import modelport.gateway.server.app, modelport.exporters.cli.export, sys; "
        "print('cryptography' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


# -- what a signature covers ----------------------------------------------------------------------


def test_a_signed_version_is_verified_with_any_of_the_keys(version: Path, key: PrivateKey) -> None:
    verify(version, key.public)
    verify(version, PrivateKey.generate().public, key.public)
    assert signing.signer_of(version) == key.public.fingerprint


def test_the_copy_is_private_and_gone_afterwards(version: Path, key: PrivateKey) -> None:
    with signing.verified_copy(
        version, signing.verify_signature(version, "m", [key.public])
    ) as copy:
        assert copy.parts[-2:] == ("m", "1")
        root = copy.parents[1]
        assert root.stat().st_mode & 0o077 == 0
    assert not root.exists()


def test_what_was_verified_cannot_be_changed_any_more(version: Path, key: PrivateKey) -> None:
    with signing.verified_copy(
        version, signing.verify_signature(version, "m", [key.public])
    ) as copy:
        (version / "model.onnx").write_bytes(b"another model")
        assert (copy / "model.onnx").read_bytes() == CONTENT


def test_a_signature_with_another_key_is_refused(version: Path, key: PrivateKey) -> None:
    other = PrivateKey.generate()
    signing.sign(version, other)
    reason = refused(version, key.public)
    assert other.public.fingerprint in reason
    assert key.public.fingerprint in reason


def test_a_signature_that_borrows_the_name_of_a_trusted_key_is_refused(
    version: Path, key: PrivateKey
) -> None:
    path = signing.sign(version, PrivateKey.generate())
    path.write_text(json.dumps({**json.loads(path.read_text()), "key": key.public.fingerprint}))
    assert refused(version, key.public).startswith("certificate.json does not match")


def test_a_signature_for_another_purpose_does_not_fit(version: Path, key: PrivateKey) -> None:
    """The same key over the same bytes, without the prefix that says what is signed."""
    path = version / signing.SIGNATURE
    bare = base64.b64encode(key.sign((version / signing.CERTIFICATE).read_bytes())).decode()
    path.write_text(json.dumps({**json.loads(path.read_text()), "signature": bare}))
    assert refused(version, key.public).startswith("certificate.json does not match")


@pytest.mark.parametrize("change", [b" ", b"\n"])
def test_one_space_more_in_the_certificate_is_refused(
    version: Path, key: PrivateKey, change: bytes
) -> None:
    with (version / signing.CERTIFICATE).open("ab") as file:
        file.write(change)
    assert refused(version, key.public).startswith("certificate.json does not match")


def test_the_signature_of_another_version_is_refused(version: Path, key: PrivateKey) -> None:
    theirs = (version / signing.SIGNATURE).read_bytes()
    (version / "model.onnx").write_bytes(b"another model")
    certify(version)
    signing.sign(version, key)
    verify(version, key.public)
    (version / signing.SIGNATURE).write_bytes(theirs)
    assert refused(version, key.public).startswith("certificate.json does not match")


def test_a_rewritten_manifest_does_not_hide_a_changed_file(version: Path, key: PrivateKey) -> None:
    (version / "model.onnx").write_bytes(CONTENT[::-1])
    manifest.write(version)
    assert manifest.verify(version)
    assert refused(version, key.public) == (
        "'model.onnx' does not match its SHA-256 in certificate.json"
    )


def test_a_rewritten_certificate_does_not_hide_a_changed_file(
    version: Path, key: PrivateKey
) -> None:
    (version / "model.onnx").write_bytes(CONTENT[::-1])
    certify(version)
    manifest.write(version)
    assert refused(version, key.public).startswith("certificate.json does not match")


def test_a_signed_version_of_another_model_is_refused(version: Path, key: PrivateKey) -> None:
    assert "is of model 'm', not 'other'" in refused(version, key.public, model="other")


def test_an_older_signed_version_passes_under_another_number(
    version: Path, key: PrivateKey
) -> None:
    """Documented: a number is not part of a release."""
    verify(version.rename(version.with_name("7")), key.public)


def test_files_that_were_added_or_removed_are_named(version: Path, key: PrivateKey) -> None:
    extra = version / "variables" / "extra.so"
    extra.write_bytes(b"")
    assert refused(version, key.public) == (
        "'variables/extra.so' is not listed in certificate.json"
    )
    extra.rename(version / "manifest.json.bak")
    assert "'manifest.json.bak' is not listed" in refused(version, key.public)
    (version / "manifest.json.bak").unlink()
    (version / "model.onnx").unlink()
    assert refused(version, key.public) == "'model.onnx' is listed in certificate.json but missing"


def test_without_a_signature_or_a_certificate_nothing_is_verified(
    version: Path, key: PrivateKey
) -> None:
    certificate, signature = version / signing.CERTIFICATE, version / signing.SIGNATURE
    text = signature.read_text()
    signature.unlink()
    assert refused(version, key.public).startswith("certificate.json.sig is missing")
    assert signing.signer_of(version) is None
    signature.write_text(text)
    certificate.unlink()
    assert refused(version, key.public).startswith("certificate.json is missing")


def test_no_key_trusts_nothing(version: Path) -> None:
    assert "trusted is none" in refused(version)


# -- files that are none --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 32, 63, 65, 128])
def test_a_signature_of_another_length_is_refused(
    version: Path, key: PrivateKey, length: int
) -> None:
    path = version / signing.SIGNATURE
    document = json.loads(path.read_text())
    signature = (base64.b64decode(document["signature"]) * 2)[:length]
    path.write_text(json.dumps({**document, "signature": base64.b64encode(signature).decode()}))
    assert refused(version, key.public).startswith("certificate.json does not match")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: b"",
        lambda text: text[: len(text) // 2],
        lambda text: b"\xff" + text,
        lambda text: b"[]",
        lambda text: b"null",
        lambda text: b"{}",
        lambda text: b"[" * 4000,
        lambda text: text.replace(signing.FORMAT.encode(), b"modelport-signature/2"),
        lambda text: text.replace(b'"key": "', b'"key": "0'),
        lambda text: text.replace(b'"key": "', b'"key": 1, "was": "'),
        lambda text: text.replace(b'"signature": "', b'"signature": "*'),
        lambda text: text.replace(b'"signature": "', b'"signature": 1, "was": "'),
    ],
)
def test_an_invalid_signature_file_is_refused(
    version: Path, key: PrivateKey, change: Callable[[bytes], bytes]
) -> None:
    path = version / signing.SIGNATURE
    path.write_bytes(change(path.read_bytes()))
    message = "certificate.json.sig is not a signature; publish the version again"
    assert refused(version, key.public) == message
    with pytest.raises(IntegrityError, match="is not a signature"):
        signing.signer_of(version)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff",
        b"[" * 100_000,
        b'{"model": {"name": "m"}, "artifact": {"files": []}}',
        b'{"model": {"name": "m"}, "artifact": {"files": {"model.onnx": "x"}}}',
        b'{"model": {"name": "m"}, "artifact": {"files": {}, "size_bytes": Infinity}}',
        b'{"model": "m", "artifact": {"files": {}}}',
    ],
)
def test_an_invalid_certificate_is_refused_even_if_signed(
    version: Path, key: PrivateKey, content: bytes
) -> None:
    (version / signing.CERTIFICATE).write_bytes(content)
    signing.sign(version, key)
    message = "certificate.json is not a certificate; publish the version again"
    assert refused(version, key.public) == message
    with pytest.raises(IntegrityError, match="is not a certificate"):
        signing.read_certificate(version, "m")


@pytest.mark.parametrize("name", [signing.CERTIFICATE, signing.SIGNATURE])
def test_files_of_endless_size_are_refused_unread(
    version: Path, key: PrivateKey, name: str
) -> None:
    os.truncate(version / name, 2**40)
    assert f"{name} is larger than" in refused(version, key.public)


def test_an_artifact_of_endless_size_is_not_copied_to_its_end(
    version: Path, key: PrivateKey
) -> None:
    os.truncate(version / "model.onnx", 2**40)
    with (
        pytest.raises(IntegrityError, match="is larger than certificate"),
        signing.verified_copy(version, signing.verify_signature(version, "m", [key.public])),
    ):
        pass


@pytest.mark.parametrize("name", ["model.onnx", signing.CERTIFICATE, signing.SIGNATURE])
def test_a_pipe_in_place_of_a_file_does_not_stop_the_check(
    version: Path, key: PrivateKey, name: str
) -> None:
    (version / name).unlink()
    os.mkfifo(version / name)
    assert refused(version, key.public) == f"'{name}' cannot be read: it is not a regular file"


@pytest.mark.parametrize("name", ["model.onnx", signing.CERTIFICATE, signing.SIGNATURE])
def test_a_folder_in_place_of_a_file_is_named(version: Path, key: PrivateKey, name: str) -> None:
    (version / name).unlink()
    (version / name).mkdir()
    assert f"'{name}'" in refused(version, key.public)


def test_links_are_judged_by_what_they_lead_to(
    version: Path, key: PrivateKey, tmp_path: Path
) -> None:
    file = version / "model.onnx"
    moved = file.rename(tmp_path / "moved")
    os.link(moved, file)
    verify(version, key.public)
    file.unlink()
    file.symlink_to(moved)
    verify(version, key.public)
    moved.write_bytes(CONTENT[::-1])
    assert "'model.onnx' does not match" in refused(version, key.public)
    moved.unlink()
    assert refused(version, key.public) == "'model.onnx' cannot be read: No such file or directory"
    file.unlink()
    (version / "variables").rename(tmp_path / "variables")
    (version / "variables").symlink_to(tmp_path / "variables")
    file.write_bytes(CONTENT)
    assert "'variables/weights.bin' is listed" in refused(version, key.public)


def test_a_name_that_is_no_text_is_named(version: Path, key: PrivateKey) -> None:
    (version / os.fsdecode(b"model\xff.onnx")).write_bytes(b"")
    assert refused(version, key.public) == ("'model\\udcff.onnx' is not listed in certificate.json")


def test_a_certificate_that_lists_a_file_outside_is_refused(
    version: Path, key: PrivateKey, tmp_path: Path
) -> None:
    (tmp_path / "m" / "outside").write_bytes(b"x")
    path = version / signing.CERTIFICATE
    document = json.loads(path.read_text())
    document["artifact"]["files"]["../outside"] = {"sha256": hashlib.sha256(b"x").hexdigest()}
    path.write_text(json.dumps(document))
    signing.sign(version, key)
    assert refused(version, key.public) == (
        "'../outside' is listed in certificate.json but missing"
    )


def test_without_a_place_for_the_copy_the_reason_says_so(
    version: Path, key: PrivateKey, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    with (
        pytest.raises(Internal, match="TMPDIR to a folder with 1031 bytes of room") as caught,
        signing.verified_copy(version, signing.verify_signature(version, "m", [key.public])),
    ):
        pass
    assert str(tmp_path) not in str(caught.value)
