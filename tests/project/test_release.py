"""What a release writes and looks at: the index of wheels, and links."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "release"))
if not (ROOT / "release").exists():
    pytest.skip("needs the source tree", allow_module_level=True)

import index  # noqa: E402
import links  # noqa: E402
import publish  # noqa: E402

WHEEL = "openreg_ops-0.1.0+torch2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl"


def test_index_has_a_page_for_each_package():
    files = [
        {"name": WHEEL, "url": "https://example.org/openreg_ops-0.1.0%2Btorch2.13.0.whl", "digest": "sha256:12ab"},
        {"name": "openreg_tools-0.1.0-py3-none-any.whl", "url": "https://example.org/a&b.whl", "digest": None},
        {"name": "notes.txt", "url": "https://example.org/notes.txt", "digest": None},
    ]
    written = index.pages(files)
    assert set(written) == {"index.html", "openreg-ops/index.html", "openreg-tools/index.html"}
    assert '<a href="openreg-ops/">openreg-ops</a>' in written["index.html"]
    link = f'<a href="https://example.org/openreg_ops-0.1.0%2Btorch2.13.0.whl#sha256=12ab">{WHEEL}</a>'
    assert link in written["openreg-ops/index.html"]
    assert '<a href="https://example.org/a&amp;b.whl">' in written["openreg-tools/index.html"]
    assert index.normalized("A.b__C-d") == "a-b-c-d"


@pytest.mark.processes
def test_pip_reads_the_index(tmp_path):
    """pip chooses a wheel by its local version, and compares its digest."""
    (tmp_path / "dist").mkdir()
    for torch in ("2.13.0", "2.14.0"):
        name = f"openreg_ops-0.1.0+torch{torch}-py3-none-any.whl"
        (tmp_path / "dist" / name).write_bytes(torch.encode())
    index.write(index.described(tmp_path / "dist"), tmp_path / "wheels")
    page = (tmp_path / "wheels" / "openreg-ops" / "index.html").read_text()
    assert hashlib.sha256(b"2.13.0").hexdigest() in page
    command = [sys.executable, "-m", "pip", "--isolated", "index", "versions", "openreg_ops"]
    said = subprocess.run([*command, "--index-url", (tmp_path / "wheels").as_uri()], capture_output=True, text=True)
    assert "Available versions: 0.1.0+torch2.14.0, 0.1.0+torch2.13.0" in said.stdout, said.stderr


def test_dead_links_of_a_site(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#here">b</a><a href="b.html#gone">b</a><img src="missing.svg"><a href="#top" id="top">top</a>'
        '<a href="https://example.org/x">elsewhere</a><a href="folder/?plain=1">folder</a>'
        f'<a href="{links.REPOSITORY}/blob/v0.1.0/README.md">r</a><a href="{links.REPOSITORY}/blob/v0.1.0/GONE.md">r</a>'
    )
    (tmp_path / "b.html").write_text('<h1 id="here">b</h1>')
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "index.html").write_text('<a href="../a.html">a</a>')
    found, count, elsewhere = links.check(tmp_path)
    assert found == [
        "a.html: b.html#gone: b.html has no anchor gone",
        "a.html: missing.svg: there is no such file",
        f"a.html: {links.REPOSITORY}/blob/v0.1.0/GONE.md: the repository has no GONE.md",
    ]
    assert (count, elsewhere) == (9, 1)


def test_dead_links_of_markdown(tmp_path):
    (tmp_path / "README.md").write_text(
        "[a](a.md#part) ![b](b.svg) [c](https://example.org) [d](../../actions)\n```\nx[0](y)\n```\n"
    )
    (tmp_path / "a.md").touch()
    assert list(links.check_markdown(tmp_path / "README.md")) == ["README.md: b.svg: there is no such file"]
    assert list(links.check_markdown(ROOT / "README.md")) == []


def test_pages_keep_every_version(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("old")
    target = tmp_path / "pages"
    assert publish.add(tmp_path / "site", target, "main") == ["main"]
    for name in ("v0.9.0", "v0.10.0"):
        publish.add(tmp_path / "site", target, name)
    index.write([], target / "wheels")
    (tmp_path / "site" / "index.html").write_text("new")
    assert publish.add(tmp_path / "site", target, "main") == ["v0.10.0", "v0.9.0", "main"]
    assert json.loads((target / "versions.json").read_text()) == ["v0.10.0", "v0.9.0", "main"]
    assert "url=v0.10.0/" in (target / "index.html").read_text()
    assert [(target / name / "index.html").read_text() for name in ("v0.9.0", "main")] == ["old", "new"]
    with pytest.raises(SystemExit, match="expected main or a tag such as v0.1.0, but got '../x'"):
        publish.add(tmp_path / "site", target, "../x")
