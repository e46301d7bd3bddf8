"""Documents stay true: links lead somewhere, and the README's commands and paths exist."""
import re
import subprocess
from urllib.parse import unquote

import pytest
from conftest import ROOT

FENCE = re.compile(r"^(```|~~~)[^\n]*\n(.*?)^\1\s*$", re.M | re.S)
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s*(\S+)", re.M)
README = ROOT / "README.md"


def tracked():
    """Documents under version control, and new ones that are not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode == 0:
        found = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:  # an unpacked archive
        found = [p for p in ROOT.rglob("*.md") if not {"target", ".venv", ".venv-transformers", ".venv-vllm", ".venv-ray", ".venv-kernels"} & set(p.relative_to(ROOT).parts)]
    return sorted(p for p in found if p.exists())


def anchors(text):
    """The anchors of a document's headings, made as GitHub makes them."""
    made, seen = set(), {}
    for heading in re.findall(r"^#{1,6}\s+(.*?)\s*#*\s*$", FENCE.sub("", text), re.M):
        heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        count = seen.get(anchor, 0)
        seen[anchor] = count + 1
        made.add(f"{anchor}-{count}" if count else anchor)
    return made | set(re.findall(r"<a\s+(?:name|id)=\"([^\"]+)\"", text))


def broken_links(path, text):
    prose = re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))
    broken = []
    for match in LINK.finditer(prose):
        target = unquote(match[1] or match[2])
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.exists() or ROOT not in (there, *there.parents):
            broken.append(f"{target}: no such file in the project")
        elif anchor and there.suffix == ".md" and anchor not in anchors(there.read_text() if name else text):
            broken.append(f"{target}: no such heading")
    return broken


@pytest.mark.parametrize("path", tracked(), ids=lambda p: str(p.relative_to(ROOT)))
def test_links_resolve(path):
    assert broken_links(path, path.read_text()) == []


def test_broken_links_are_noticed():
    path = ROOT / "fixtures" / "README.md"
    text = """
[a](blocks/README.md) [b](missing.md) [c](#here-it-is) [d](#nowhere) [e](https://example.com/y) `[f](none)` [g](../../outside.md)
[h](README.md#fixtures) [i](README.md#none) ![j](none.png "Title") [the `k`](container)
[l]: none.md

## Here, it is
```
[m](none)
```
"""
    broken = [problem.split(":")[0] for problem in broken_links(path, text)]
    assert broken == ["missing.md", "#nowhere", "../../outside.md", "README.md#none", "none.png", "none.md"]


def make_targets():
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.M))


@pytest.mark.skipif(not README.exists(), reason="no README.md yet")
def test_the_readme_says_how_to_test_and_its_commands_exist():
    text = README.read_text()
    assert "make test" in text
    missing = []
    code = "\n".join(match[2] for match in FENCE.finditer(text))
    spoken = code + "\n" + "\n".join(re.findall(r"`([^`\n]+)`", FENCE.sub("", text)))
    targets = make_targets()
    for target in re.findall(r"\bmake ([a-z][\w-]*)", spoken):
        if target not in targets:
            missing.append(f"make {target}")
    tops = "|".join(re.escape(p.name) for p in ROOT.iterdir() if p.is_dir() and p.name not in ("target", ".git", ".venv"))
    for name in re.findall(rf"(?<![\w/.-])(?:\./)?((?:{tops})/[\w./-]*\w)", code):
        if not (ROOT / name).exists():
            missing.append(name)
    assert missing == []
