"""Pages of results name the commit that they report, and the site says which are older than it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.docs.pages import ROOT

_SPEC = importlib.util.spec_from_file_location("result_pages", ROOT / ".ci" / "result_pages.py")
assert _SPEC is not None
assert _SPEC.loader is not None
result_pages = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(result_pages)

PAGE = result_pages.ResultPage("sweep", ("code",))


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True)


def committed(root: Path, file: str, text: str) -> None:
    (root / file).parent.mkdir(exist_ok=True)
    (root / file).write_text(text)
    git(root, "add", ".")
    git(root, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-m", file)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init")
    committed(tmp_path, "code/a.py", "1")
    return tmp_path


def test_every_page_that_a_make_target_writes_names_its_commit() -> None:
    makefile = (ROOT / "Makefile").read_text()
    written = set(re.findall(r"(?:--page|PAGE :?=) (docs/\S+\.md)", makefile))
    assert written <= set(result_pages.PAGES)
    for name, page in result_pages.PAGES.items():
        recipe = re.search(rf"^{page.verb}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        assert recipe is not None
        assert f"$(STAMP) {name}\n" in recipe[1], page.verb
        assert result_pages.STAMP.search((ROOT / name).read_text()), name
        assert all((ROOT / folder).is_dir() for folder in page.code)
    release = re.search(r"^pages: ([^#]+) ##", makefile, re.MULTILINE)
    assert release is not None
    assert set(release[1].split()) == {page.verb for page in result_pages.PAGES.values()}


def test_a_page_says_that_the_code_has_changed_since(repository: Path) -> None:
    text = result_pages.stamped("# Results\n\nText\n", PAGE, repository)
    assert re.match(r"# Results\n\nResults at commit `\w{12}`\.\n\nText\n$", text)
    committed(repository, "other/b.py", "1")
    assert result_pages.age(text, PAGE, repository) == ""
    committed(repository, "code/a.py", "2")
    told = result_pages.age(text, PAGE, repository)
    assert told == "Later commits that change `code/`: 1; `make sweep` writes this page again."
    again = result_pages.stamped(text, PAGE, repository)
    assert again != text
    assert again.count("Results at commit") == 1
    assert result_pages.age(again, PAGE, repository) == ""


def test_a_page_of_uncommitted_code_or_of_no_commit_says_so(repository: Path) -> None:
    (repository / "code" / "a.py").write_text("2")
    text = result_pages.stamped("# Results\n", PAGE, repository)
    assert "with changes that are not committed." in text
    assert "make sweep" in result_pages.age(text, PAGE, repository)
    assert "does not name" in result_pages.age("# Results\n", PAGE, repository)
    unknown = "Results at commit `123456789012`."
    assert "does not have that commit" in result_pages.age(unknown, PAGE, repository)
    assert result_pages.age(unknown, PAGE, Path("/")) == ""


def test_the_site_shows_it_below_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_pages, "age", lambda text, page: "It is old.")
    text = "# Sweep\n\nResults at commit `123456789012`.\n\nText"
    pages = [SimpleNamespace(file=SimpleNamespace(src_uri=uri)) for uri in ("sweep.md", "gate.md")]
    shown = [result_pages.on_page_markdown(text, page, config=None) for page in pages]
    assert shown == [text.replace("`.\n", "`.\n\n!!! warning\n\n    It is old.\n"), text]
