"""Capture layers: the table of conventions by which ids in a head's config become boundaries, row by row (B01, B07)."""

import dataclasses

import pytest

from weights import Eagle3Config, Refused, named
from weights.capture import boundaries

HEAD = Eagle3Config.read(named("qwen3-30b-a3b-eagle3")["draft"], "x")


def head(ids, family="specforge", count=None):
    count = count or (3 if ids is None else len(ids))
    return dataclasses.replace(HEAD, aux_ids=None if ids is None else tuple(ids), aux_count=count, family=family)


ROWS = [
    # ids, family, layers, override -> boundaries, source
    (None, "safeailab", 48, None, (2, 24, 45), "guessed"),
    ([1, 23, 44], "specforge", 48, None, (2, 24, 45), "config"),
    ([1, 46, 90], "specforge", 94, None, (2, 47, 91), "config"),
    ([24, 30, 36], "specforge", 36, None, (24, 30, 36), "config"),
    ([1, 30, 36], "specforge", 36, None, (1, 30, 36), "config"),  # 36 is no layer: 1 cannot mean an output here
    ([3, 30, 58], "speculators", 61, None, (3, 30, 58), "config"),
    ([1, 30, 58], "speculators", 61, None, (1, 30, 58), "config"),
    ([2, 30, 58], "specforge", 61, None, (2, 30, 58), "guessed"),  # a published head meant outputs by this
    ([58, 2, 30], "specforge", 61, None, (2, 30, 58), "guessed"),
    ([3, 20, 40], "specforge", 48, None, (4, 21, 41), "guessed"),
    ([0, 20, 40], "specforge", 48, None, (1, 21, 41), "guessed"),
    ([23, 1, 44], "specforge", 48, None, (2, 24, 45), "config"),
    ([3, 20, 40], "vllm", 48, None, (3, 20, 40), "config"),
    ([2, 24, 45], "vllm", 48, None, (2, 24, 45), "guessed"),
    ([1, 23, 44], "vllm", 48, None, (2, 24, 45), "guessed"),  # B_1 to vLLM itself, and no trainer means that
    ([2, 30, 58], "specforge", 61, "output:2,30,58", (3, 31, 59), "override"),
    ([1, 23, 44], "specforge", 48, "boundary:0,24,48", (0, 24, 48), "override"),
    (None, "safeailab", 48, "output:44,1,23", (2, 24, 45), "override"),
]


@pytest.mark.parametrize("ids, family, layers, override, expected, source", ROWS)
def test_the_table_of_capture_conventions(ids, family, layers, override, expected, source):
    """B01. Mutants: an off-by-one in any row; an ambiguous row called "config"; the order of the ids kept."""
    capture = boundaries(head(ids, family), layers, override)
    assert (capture.boundaries, capture.source) == (expected, source)
    assert capture.why and "\n" not in capture.why


@pytest.mark.parametrize(
    "ids, layers, override, words",
    [
        ([1, 47, 48], 47, None, ["48", "47 layers"]),
        ([1, 5, 49], 48, None, ["49", "48 layers"]),
        ([-1, 5, 9], 48, None, ["-1"]),
        ([1, 5, 5], 48, None, ["[1, 5, 5]", "twice"]),
        (None, 6, None, ["[2, 3, 3]", "--capture-layers"]),
        (None, 48, "boundary:2,24,49", ["49", "48 layers"]),
        (None, 48, "output:2,24,48", ["48", "48 layers"]),
        (None, 48, "boundary:2,24", ["2 layers", "fuses 3"]),
        (None, 48, "boundary:2,2,24", ["twice"]),
        (None, 48, "2,24,45", ["'2,24,45'", "boundary:", "output:"]),
        (None, 48, "boundary:", ["boundary:", "output:"]),
    ],
)
def test_capture_layers_that_cannot_be_are_refused(ids, layers, override, words):
    """B01, B07. Mutants: range, number or repetition not checked."""
    with pytest.raises(Refused) as error:
        boundaries(head(ids), layers, override)
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_the_default_layers_are_for_three_features():
    """B07. Mutant: a head that fuses two features fed with three."""
    with pytest.raises(Refused, match="names 3 layers.*fuses 2"):
        boundaries(head(None, count=2), 48)
