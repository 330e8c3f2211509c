"""The Chinese pages match the English ones: the same sections, commands and output, with links between both."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CHINESE = ROOT / "docs" / "zh"
NAMES = sorted(path.name for path in CHINESE.glob("*.md"))
BLOCK = re.compile(r"^```.*?^```$", re.M | re.S)
HEADING = re.compile(r"^(##+) (.+)$", re.M)
MARKED = re.compile(r'<a id="([\w-]+)"></a>(.+)')


def english(name: str) -> Path:
    return ROOT / name if name == "README.md" else ROOT / "docs" / name


def anchor(heading: str) -> str:
    """Return GitHub's anchor of an English heading. Chinese headings are preceded by it, so that links are the same."""
    marked = MARKED.fullmatch(heading)
    return marked[1] if marked else re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def without_comments(block: str) -> str:
    return re.sub(r"(^|[ \t]+)#( .*)?$", "", block, flags=re.M)


def sections(page: Path) -> dict[str, tuple[str, list[str]]]:
    """Return {heading's anchor: (its depth, the code blocks up to the next heading)}; '' is the top of the page."""
    text, blocks = page.read_text(encoding="utf-8"), []

    def numbered(match):
        blocks.append(without_comments(match[0]))
        return f"\0{len(blocks) - 1}\0"

    top, *parts = HEADING.split(BLOCK.sub(numbered, text))  # ignore lines in code blocks that look like headings
    found = {"": ("", top)}
    found |= {anchor(title): (depth, body) for depth, title, body in zip(*[iter(parts)] * 3, strict=True)}
    numbers = {key: re.findall("\0(\\d+)\0", body) for key, (_, body) in found.items()}
    return {key: (depth, [blocks[int(number)] for number in numbers[key]]) for key, (depth, _) in found.items()}


@pytest.mark.parametrize("name", NAMES)
def test_chinese_sections_match_english_structure_and_code_blocks(name):
    ours, theirs = sections(CHINESE / name), sections(english(name))
    assert list(ours) == [key for key in theirs if key in ours]
    for key, section in ours.items():
        assert section == theirs[key], key


@pytest.mark.parametrize("name", NAMES)
def test_chinese_page_links_the_english_sections_it_lacks(name):
    ours, theirs = sections(CHINESE / name), sections(english(name))
    links = re.findall(rf"\]\(\.\./{name}#([\w-]+)\)", (CHINESE / name).read_text(encoding="utf-8"))
    parent = ""
    for key, (depth, _) in theirs.items():
        assert key in ours or key in links or (depth == "###" and parent not in ours), key
        parent = key if depth == "##" else parent


@pytest.mark.parametrize("name", NAMES)
def test_chinese_and_english_pages_link_each_other_at_top(name):
    for page, other in [(CHINESE / name, english(name)), (english(name), CHINESE / name)]:
        top = page.read_text(encoding="utf-8").split("\n\n")[1]
        assert other in [(page.parent / link).resolve() for link in re.findall(r"\]\(([^)]+)\)", top)]


def test_chinese_readme_lists_every_english_docs_page():
    listed = [
        {Path(link).name for link in re.findall(r"\]\(([^)#]+\.md)", page.read_text(encoding="utf-8"))}
        for page in (CHINESE / "README.md", english("README.md"))
    ]
    assert listed[0] >= listed[1]
