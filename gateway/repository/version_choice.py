"""Change the served versions of a model in its ``config.pbtxt``, and nothing else.

Text and comments of the file are kept: a setting is replaced in its place, or appended. The result
is parsed before it is written, and may differ only in that setting. The file is replaced
atomically, so that a polling gateway sees the old or the new one.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from modelport.gateway.errors import InvalidArgument, NotFound
from modelport.gateway.repository import config as configuration
from modelport.gateway.repository.config_file import ConfigFile, config_file
from modelport.gateway.repository.scan import VERSION_NAME, ModelEntry, VersionEntry, scan_model
from modelport.gateway.repository.storage.location import Location
from modelport.gateway.repository.version_policy import VersionPolicy

#: Config parameter ``version_label.stable = "3"``: requests may ask for ``stable`` instead of 3.
LABEL = "version_label."
#: Config parameter ``default_version = "3"``: the version for requests without one, instead of the
#: newest that is served.
DEFAULT = "default_version"
LABEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\Z")
_VERSION_POLICY = re.compile(r"\bversion_policy\s*+:?\s*+\{")
_PARAMETERS = re.compile(
    rf"\bparameters\s*+:?\s*+\{{\s*+key\s*+:\s*+[\"']({re.escape(LABEL)}|{DEFAULT}[\"'])"
)


class VersionChoice:
    """The labels and the version policy of a model; changes replace its ``config.pbtxt``.

    Every change raises ``Unavailable`` if another process has changed the file meanwhile.

    Raises:
        NotFound: it has no versions.
        InvalidArgument: its configuration does not parse.
    """

    def __init__(self, entry: ModelEntry, file: ConfigFile) -> None:
        self.name = entry.name
        if entry.problem:
            raise InvalidArgument(f"'{self.name}': {entry.problem}")
        if not entry.versions:
            raise NotFound(f"model '{self.name}' has no versions; they are folders named 1, 2, ...")
        self._entry, self._file, self._written = entry, file, entry.config_text
        self._text = entry.config_text or ""
        self._config = configuration.parse(self._text)

    @classmethod
    def of_folder(cls, path: Path) -> VersionChoice:
        """The choice of the model in the folder ``path``.

        Raises:
            NotFound, InvalidArgument: as for the class, or there is no such folder.
        """
        if not path.is_dir():
            raise NotFound(f"'{path}' is not a model's folder")
        entry = scan_model(path.parent.resolve(), path.resolve())
        return cls(entry, config_file(path.parent, path.name))

    @classmethod
    def find(cls, repository: Path | Location, model: str) -> VersionChoice | None:
        """The choice of ``model``; None if ``repository`` does not hold it.

        Raises:
            ModelportError: as for the class, or the object store does not respond, or refuses.
        """
        if isinstance(repository, Path):
            folder = repository / model
            return cls.of_folder(folder) if folder.is_dir() else None
        from modelport.gateway.repository.storage import complete_versions  # slow imports

        stored = complete_versions.find(repository, model)
        if stored is None:
            return None
        versions = {number: VersionEntry(number, Path(), ()) for number in stored.published}
        file = config_file(repository, model)
        return cls(ModelEntry(model, Path(), file.read(), versions), file)

    @property
    def versions(self) -> list[int]:
        """The versions in the folder, ascending."""
        return sorted(self._entry.versions)

    @property
    def labels(self) -> dict[str, str]:
        parameters = self._config.parameters
        found = {key: parameters[key].string_value for key in parameters if key.startswith(LABEL)}
        return {key.removeprefix(LABEL): found[key] for key in sorted(found)}

    def allowed(self) -> list[int]:
        """The versions that the version policy serves, ascending.

        Raises:
            InvalidArgument: there is none.
        """
        chosen = self._policy.chosen(self._entry.versions)
        if not chosen:
            raise InvalidArgument(f"the version_policy of model '{self.name}' allows no version")
        return chosen[::-1]

    @property
    def _policy(self) -> VersionPolicy:
        return VersionPolicy.of(self._config.version_policy)

    @property
    def _named(self) -> set[int]:
        """The versions in the folder that have a label."""
        return {version for version in self.versions if str(version) in self.labels.values()}

    def default(self) -> int:
        """The version for requests without one.

        Raises:
            InvalidArgument: the version policy allows none.
        """
        allowed = self.allowed()
        configured = chosen_default(self._config)
        return configured if configured in allowed else allowed[-1]

    def before(self, version: int) -> int:
        """The version before ``version``.

        Raises:
            NotFound: there is none.
        """
        older = [each for each in self.versions if each < version]
        if not older:
            raise NotFound(f"version {version} is the oldest of model '{self.name}'")
        return older[-1]

    def label(self, label: str, version: int | None) -> None:
        """Assign ``label`` to ``version``; None removes it.

        Raises:
            InvalidArgument: the label is invalid.
            NotFound: there is no such version, or no such label to remove.
        """
        if not LABEL_NAME.match(label):
            raise InvalidArgument(
                f"'{label}' is not a valid label; use letters, digits, '_', '.' and '-', as in "
                "'stable'"
            )
        key = LABEL + label
        if version is not None:
            self._require(version)
        elif key not in self._config.parameters:
            raise NotFound(f"model '{self.name}' has no label '{label}'")
        self._set_parameter(key, version)
        self._commit()

    def _set_parameter(self, key: str, version: int | None) -> None:
        """Set a parameter to ``version``; None removes it."""
        setting = f'parameters {{ key: "{key}" value {{ string_value: "{version}" }} }}\n'
        rest = configuration.parse(self._text)
        rest.parameters.pop(key, None)
        quoted = rf"[\"']{re.escape(key)}[\"']"
        pattern = re.compile(rf"\bparameters\s*+:?\s*+\{{\s*+key\s*+:\s*+{quoted}")
        self._replace(pattern, setting if version is not None else "", rest)

    def serve_only(self, version: int) -> None:
        """Serve ``version`` by default, and otherwise only versions with a label.

        Raises:
            NotFound: there is no such version.
        """
        self._require(version)
        self._serve({version} | self._named, version)
        self._commit()

    def _serve(self, versions: Collection[int], default: int) -> None:
        """Serve exactly ``versions``."""
        listed = ", ".join(map(str, sorted(versions)))
        self._set_policy(f"specific {{ versions: [ {listed} ] }}")
        self._set_default(default)

    def _set_default(self, version: int) -> None:
        """Make ``version``, which the policy serves, the default."""
        if version != self.allowed()[-1]:
            self._set_parameter(DEFAULT, version)
        elif DEFAULT in self._config.parameters:
            self._set_parameter(DEFAULT, None)

    def prefer(self, version: int, other: int) -> None:
        """Make ``version`` the default in place of ``other``; every label keeps answering.

        Nothing changes if that is so already.

        Raises:
            NotFound: there is no such version.
        """
        self._require(version)
        policy = self._policy
        wanted = policy.preferring(self.versions, self.default(), version, other, self._named)
        if wanted.specific is not None and wanted != policy:
            self._serve(wanted.specific, version)
        elif self.default() != version:
            self._set_default(version)
        self._commit()

    def serve_latest(self) -> None:
        """Serve the newest version again."""
        self._set_policy("latest { num_versions: 1 }")
        self._set_default(self.versions[-1])
        self._commit()

    def _set_policy(self, policy: str) -> None:
        rest = configuration.parse(self._text)
        rest.ClearField("version_policy")
        self._replace(_VERSION_POLICY, f"version_policy {{ {policy} }}\n", rest)

    def _require(self, version: int) -> None:
        if version not in self.versions:
            known = ", ".join(map(str, self.versions))
            raise NotFound(f"model '{self.name}' has no version {version}; it has {known}")

    def _replace(self, pattern: re.Pattern[str], setting: str, rest: Any) -> None:
        """Replace the block that begins with ``pattern`` by ``setting``, or append it.

        Args:
            rest: the configuration without such a block.
        """
        wanted = configuration.parse(setting)
        wanted.MergeFrom(rest)
        match = pattern.search(self._text)
        if match is None:
            newline = "\n" if self._text and not self._text.endswith("\n") else ""
            text = f"{self._text}{newline}{setting}"
        else:
            end = _end_of_block(self._text, match.start())
            text = self._text[: match.start()] + setting.rstrip("\n") + self._text[end:]
        if _parsed(text) != wanted:
            raise InvalidArgument(
                f"the {configuration.FILENAME} of model '{self.name}' cannot be changed "
                f"automatically; edit it by hand to have: {setting.strip() or 'no such setting'}"
            )
        self._text, self._config = text, wanted

    def _commit(self) -> None:
        """Write all changes at once: between two writes, a poll might see another default."""
        if self._text != (self._written or ""):
            self._file.replace(self._text, self._written)
            self._written = self._text


def chosen_default(config: Any) -> int:
    """The default version that ``config`` names; 0: the newest that is served.

    Raises:
        InvalidArgument: its value is not a version.
    """
    if DEFAULT not in config.parameters:
        return 0
    text = config.parameters[DEFAULT].string_value
    if not VERSION_NAME.match(text):
        raise InvalidArgument(f"parameter '{DEFAULT}' must be a version, not '{text}'")
    return int(text)


def chooses_versions(key: str) -> bool:
    """Whether a config parameter chooses versions, and changes nothing of what they compute."""
    return key == DEFAULT or key.startswith(LABEL)


def without_choices(text: str) -> str:
    """The configuration ``text`` without the settings that choose versions, and without spaces."""
    for pattern in (_VERSION_POLICY, _PARAMETERS):
        while (match := pattern.search(text)) is not None:
            text = text[: match.start()] + text[_end_of_block(text, match.start()) :]
    return "".join(text.split())


def _end_of_block(text: str, start: int) -> int:
    """The end of the block that begins at ``start``; without a closing brace, the text's end."""
    depth = 0
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match.group() == "{" else -1
        if not depth:
            return match.end()
    return len(text)


def _parsed(text: str) -> Any:
    try:
        return configuration.parse(text)
    except InvalidArgument:
        return None
