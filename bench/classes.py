"""Classes of tokens by the text they stand for, and what cycles kept of each."""

from collections.abc import Callable

CLASSES = ("word", "name part", "digits", "punctuation", "white space", "other")


def kind(text: str) -> str:
    """Class of a token by the text it stands for."""
    bare = text.strip()
    if not bare:
        return "white space" if text else "other"
    if bare.isdecimal():
        return "digits"
    if all(c.isalnum() or c == "_" for c in bare):
        return "word" if text[0].isspace() else "name part"
    return "punctuation" if not any(c.isalnum() for c in bare) else "other"


def kept(results: list, decode: Callable[[list[int]], str]) -> dict[str, tuple[int, int]]:
    """{class: (draft tokens kept, draft tokens that could have been)} over the cycles of engine.request.Result.

    A cycle's kept tokens count for their own class; the token that came in place of a wrong guess counts as a miss of
    its class. What lies behind a miss, or past the last draft pass, is nobody's guess.
    """
    counts = {name: [0, 0] for name in CLASSES}
    for result in results:
        at = 1  # the prompt's own first token is in no cycle
        for (emitted, matched, _), shape in zip(result.cycles, result.shapes, strict=True):
            guessed = result.token_ids[at : at + min(emitted, matched + 1, shape.path - 1)]
            for depth, token in enumerate(guessed):
                count = counts[kind(decode([token]))]
                count[0] += depth < matched
                count[1] += 1
            at += emitted
    return {name: (hits, tries) for name, (hits, tries) in counts.items() if tries}
