"""What `--help` says of every command: its purpose without its own name, and each option in words."""

import argparse
import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def runs(path):
    """Whether `python -m` has something to run there."""
    return any(
        isinstance(node, ast.If) and "__main__" in ast.unparse(node.test) for node in ast.parse(path.read_text()).body
    )


FILES = [path for folder in ("engine", "bench") for path in sorted((ROOT / folder).glob("*.py")) if runs(path)]
COMMANDS = [f"{path.parent.name}.{path.stem}" for path in FILES]


class Found(Exception):
    """Carries a command's parser, which it would use next."""


@pytest.fixture
def parser(monkeypatch):
    """Function(command) -> the parser of its options."""

    def caught(self, *_):
        raise Found(self)

    def parser_of(name):
        module = importlib.import_module("engine.options" if name == "engine.generate" else name)
        with pytest.raises(Found) as found:
            module.parse([])
        return found.value.args[0]

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", caught)
    return parser_of


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_explained(parser, name):
    """Mutants: an option without a word; a description that begins with the command's own name."""
    found = parser(name)
    assert found.prog == f"python -m {name}" and not found.allow_abbrev
    assert re.match(r"[A-Z]", found.description) and found.description.rstrip().endswith(".")
    for action in found._actions:
        assert re.search(r"[a-z]{2}", action.help or ""), action.option_strings
    assert not re.search(r"^ +-\S+ .*%\(", found.format_help(), re.M)


def test_a_draft_can_be_told_its_layers(parser):
    """Mutant: a command whose --layers leaves a head no three layers, and no option to name others."""
    for name in sorted({*COMMANDS} - {"bench.peers"}):  # whose engines have options of their own
        options = {word for action in parser(name)._actions for word in action.option_strings}
        assert "--draft" not in options or "--capture-layers" in options, name


def test_readme_names_every_command():
    """Mutants: a command that the README lacks; one that went."""
    named = set(re.findall(r"\b((?:bench|engine)\.[a-z_]+)\b", (ROOT / "README.md").read_text()))
    assert not set(COMMANDS) - named
    assert not {name for name in named if name.startswith("bench.")} - set(COMMANDS)


def test_readme_names_every_option_of_generate(parser):
    """In its table of options. Mutant: an option that was added to the command alone."""
    text = (ROOT / "README.md").read_text()
    table = text[text.index("## Options") : text.index("Exit codes")]
    options = {word for action in parser("engine.generate")._actions for word in action.option_strings}
    assert {word for word in re.findall(r"--[a-z][a-z-]*", table)} == options - {"-h", "--help"}


def test_readme_links_lead_somewhere():
    """Mutants: a file that went; a heading that was renamed."""
    text = (ROOT / "README.md").read_text()
    titles = re.findall(r"^#+ (.*)", text, re.M)
    headings = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert link[1:] in headings if link.startswith("#") else (ROOT / link).exists(), link
