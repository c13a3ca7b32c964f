"""`python -m engine.generate`: a frozen list of options, and what each does. What is refused: test_cli_refused.py."""

import json
from types import SimpleNamespace

import pytest
import toys
from served import OPTIONS, SMALL, spell

from engine import options, prompts
from engine.decoding import InOrder
from engine.shape import PLAIN, Shape
from weights.config import Refused

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}!"


def test_the_list_of_options_is_frozen():
    listed = vars(options.parser().parse_args([]))
    assert sorted("--" + name.replace("_", "-") for name in listed if name != "prompt") == sorted(OPTIONS)
    shown = options.parser().format_help()
    assert all(f" {option} " in shown or f" {option}\n" in shown for option in OPTIONS)


def spelled(ids):
    return "".join(chr(32 + i) for i in ids)


def expected(text, count):
    return toys.follow(ord(text[-1]) - 32, count, toys.NEXT)


def test_text_goes_to_stdout_and_a_report_to_stderr(cli, pair):
    code, out, err, stats = cli("HELLO", *pair, "--max-new-tokens", 21)
    (request,) = stats["requests"]
    assert (code, out) == (0, spelled(expected("HELLO", 21)) + "\n")
    assert request["token_ids"] == expected("HELLO", 21) and request["text"] + "\n" == out
    assert (request["prompt_tokens"], request["output_tokens"], request["finish_reason"]) == (5, 21, "length")
    assert request["emitted_per_cycle"] == [4] * 5 and request["cycles"] == 5
    assert (request["accept_length"], request["accept_length_drafts"], request["accept_rate"]) == (4.0, 3.0, 1.0)
    assert request["shape"] == {"steps": 3, "topk": 1, "draft_tokens": 4}
    assert stats["graphs"] == [
        {
            "batch": 1,
            "shape": "3-1-4",
            "captured": False,
            "reason": stats["graphs"][0]["reason"],
            "replays": 0,
            "eager": 5,
        }
    ]
    assert stats["capture_layers"] == {"boundaries": [0, 1, 2], "source": "config"}
    assert "accept length 4.00 (3.00 without the bonus token)" in err and "raw, no chat template" in err
    assert stats["tokens_per_second"] > 0 and stats["ms"]["load"] > 0 and stats["ms"]["draft"] is None


def test_plain_decoding_has_no_accept_rate(cli, pair):
    code, out, err, stats = cli("HELLO", *pair, "--draft", "none", "--max-new-tokens", 6)
    (request,) = stats["requests"]
    assert request["token_ids"] == expected("HELLO", 6) and request["emitted_per_cycle"] == [1] * 5
    assert (request["accept_rate"], request["accept_length_drafts"], request["accept_length"]) == (None, None, 1.0)
    assert stats["capture_layers"] is None and stats["compare"] is None and "accept" not in err


@pytest.mark.parametrize("cap", [0, 1, 2])
def test_few_tokens(cli, pair, cap):
    code, out, _, stats = cli("HELLO", *pair, "--max-new-tokens", cap)
    (request,) = stats["requests"]
    assert (code, request["output_tokens"], request["finish_reason"]) == (0, cap, "length")
    assert request["cycles"] == max(0, cap - 1) and out == spelled(expected("HELLO", cap)) + "\n"
    assert stats["tokens_per_second"] is None or cap > 1


def test_tree_shapes(cli, pair):
    _, _, _, stats = cli("HELLO", *pair, "--steps", 2, "--topk", 2, "--draft-tokens", 6, "--max-new-tokens", 9)
    assert stats["requests"][0]["token_ids"] == expected("HELLO", 9)
    assert stats["graphs"][0]["shape"] == "2-2-6"


def test_stops(cli, pair):
    ids = expected("HELLO", 12)
    text = spelled(ids)
    _, out, err, stats = cli("HELLO", *pair, "--stop", text[5:7], "--stop", "never", "--max-new-tokens", 12)
    (request,) = stats["requests"]
    assert (out, request["token_ids"]) == (text[:5] + "\n", ids[:7])
    assert (request["finish_reason"], request["stop"]) == ("stop", text[5:7]) and repr(text[5:7]) in err
    assert sum(request["emitted_per_cycle"]) == request["output_tokens"] - 1
    _, _, _, stats = cli("HELLO", *pair, "--stop-id", ids[3], "--max-new-tokens", 12)
    assert (stats["requests"][0]["token_ids"], stats["requests"][0]["stop"]) == (ids[:4], ids[3])


def test_end_tokens_of_the_checkpoint(cli, kit, pair):
    ids = expected("HELLO", 12)
    target = kit.altered(pair[1], lambda config, tensors: config.update(eos_token_id=ids[4]))
    spell(target)
    given = ["HELLO", "--target", target, *pair[2:], "--max-new-tokens", 12]
    assert cli(*given)[3]["requests"][0]["token_ids"] == ids[:5]
    assert cli(*given, "--ignore-eos")[3]["requests"][0]["token_ids"] == ids


def test_a_file_of_prompts(cli, pair, tmp_path):
    file = tmp_path / "some.jsonl"
    entries = [{"prompt": "AB"}, {"token_ids": [1, 2]}, {"prompt": "ABC", "seed": 3, "note": "not read"}]
    file.write_text("\n".join(map(json.dumps, entries)) + "\n\n")
    want = [expected("AB", 5), toys.follow(2, 5, toys.NEXT), expected("ABC", 5)]
    for batch in (1, 2, 4):
        _, out, _, stats = cli("--prompt-file", file, *pair, "--max-new-tokens", 5, "--batch", batch)
        assert [request["token_ids"] for request in stats["requests"]] == want
        assert out == "".join(spelled(ids) + "\n" for ids in want)
    (tmp_path / "one.txt").write_text("AB\nC")
    assert prompts.read(str(tmp_path / "one.txt"))[0].content == "AB\nC"


def test_texts_keep_the_order_of_the_prompts(capsys):
    """Whatever order requests end in."""
    writer = InOrder()
    for index, text, finished in [(1, "b", False), (2, "c", True), (1, "B", True), (0, "a", True)]:
        request = SimpleNamespace(index=index, finished=finished)
        writer.show(SimpleNamespace(request=request, text=text, tokens=[]))
    assert capsys.readouterr().out == "a\nbB\nc\n"


def test_chat(cli, kit, pair, tmp_path):
    target = kit.altered(pair[1], lambda config, tensors: None)
    spell(target, chat_template=TEMPLATE)
    given = ["--target", target, *pair[2:], "--max-new-tokens", 4]
    _, _, err, stats = cli("AB", "--chat", *given)
    assert stats["requests"][0]["prompt_tokens"] == 3 and "chat template applied to 1" in err
    assert stats["requests"][0]["token_ids"] == expected("!", 4)
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "AB"}]}))
    assert cli("--prompt-file", file, *given)[3]["requests"][0]["token_ids"] == expected("!", 4)


def test_sampling_options(cli, kit, pair, tmp_path):
    """Each setting changes what is drawn, and the seed of a line counts before --seed. Mutants: an option that reaches
    nobody; one seed for all lines; the line's index left out."""
    given = ["--target", kit.history(), "--draft", kit.random_draft(), *SMALL, "--max-new-tokens", 40]
    entries = [{"token_ids": [1, 2]}, {"token_ids": [1, 2]}, {"token_ids": [1, 2], "seed": 7}]
    (tmp_path / "ids.jsonl").write_text("\n".join(map(json.dumps, entries)))

    def ids(*options):
        code, _, err, stats = cli("--prompt-file", tmp_path / "ids.jsonl", *given, *options)
        assert code == 0, err
        return [request["token_ids"] for request in stats["requests"]]

    greedy, warm = ids(), ids("--temperature", 1)
    assert greedy == ids("--temperature", 0) == ids("--temperature", "1e-9", "--seed", 4)
    assert len({tuple(x) for x in [*greedy, *warm]}) == 4
    assert warm == ids("--temperature", 1, "--seed", 0) == ids("--temperature", 1, "--batch", 3)
    other = ids("--temperature", 1, "--seed", 1)
    assert other[2] == warm[2] and other[0] != warm[0] and other[1] != warm[1]
    assert ids("--temperature", 1, "--top-k", 1) == greedy == ids("--temperature", 1, "--top-p", "1e-6")
    for option in (("--top-k", 3), ("--top-p", 0.5), ("--min-p", 0.5)):
        assert warm != ids("--temperature", 1, *option) != greedy
    assert ids("--temperature", 3) not in (warm, greedy)


def test_logprobs(cli, pair):
    _, _, _, stats = cli("HELLO", *pair, "--max-new-tokens", 6, "--logprobs", 2)
    (request,) = stats["requests"]
    assert [entry["token_id"] for entry in request["logprobs"]] == request["token_ids"]
    assert all(len(e["top"]) == 2 and e["top"][0] == [e["token_id"], e["logprob"]] for e in request["logprobs"])
    assert cli("HELLO", *pair, "--max-new-tokens", 6)[3]["requests"][0]["logprobs"] is None
    assert "--logprobs 2: they go to --stats FILE.json" in str(
        pytest.raises(Refused, options.parse, ["x", "--logprobs", "2"]).value
    )


def test_compare_of_draws(cli, kit):
    """Plain decoding and a sampled chain draw other ids by right: no alarm. A tree draws the same."""
    given = ["--target", kit.history(), "--draft", kit.random_draft(), *SMALL, "--temperature", 1, "--compare"]
    file = ["--prompt-file", kit.folder / "ids.jsonl", "--max-new-tokens", 30]
    file[1].write_text('{"token_ids": [5]}')
    _, _, err, stats = cli(*file, *given)
    assert stats["compare"]["identical"] is None and "x, other draws" in err
    assert cli(*file, *given, "--topk", 2)[3]["compare"]["identical"] is True


def test_compare(cli, pair):
    _, _, err, stats = cli("HELLO", *pair, "--compare", "--max-new-tokens", 21)
    compare = stats["compare"]
    assert compare["identical"] and compare["speedup"] == pytest.approx(
        compare["speculative_tokens_per_second"] / compare["plain_tokens_per_second"]
    )
    assert {entry["shape"]: entry["eager"] for entry in stats["graphs"]} == {"0-1-1": 60, "3-1-4": 20}
    assert len(compare["speedup_by_round"]) == 3 and "x, the same ids (" in err and "by round" in err


def test_without_a_tokenizer_ids_are_served(cli, kit, tmp_path):
    (tmp_path / "ids.jsonl").write_text('{"token_ids": [3]}')
    target = kit.altered(kit.map(), lambda config, tensors: None)
    code, out, _, stats = cli(
        "--prompt-file", tmp_path / "ids.jsonl", "--target", target, *SMALL, "--max-new-tokens", 3
    )
    ids = toys.follow(3, 3, toys.NEXT)
    assert (code, out.split()) == (0, list(map(str, ids))) and stats["requests"][0]["text"] is None


def test_random_weights(cli, tmp_path):
    (tmp_path / "target.json").write_text(json.dumps({"target": toys.target_config(layers=4)}))
    (tmp_path / "ids.jsonl").write_text('{"token_ids": [3]}')
    given = [
        "--random",
        tmp_path / "target.json",
        "--prompt-file",
        tmp_path / "ids.jsonl",
        *SMALL,
        "--max-new-tokens",
        3,
    ]
    assert cli(*given)[0] == 0
    code, _, err, _ = cli(*given, "--layers", 2)
    assert code == 0 and "random weights" in err


@pytest.mark.parametrize(
    "given, shape",
    [
        ("", Shape(3, 1, 4)),
        ("--steps 5", Shape(5, 1, 6)),
        ("--steps 0", PLAIN),
        ("--topk 4", Shape(3, 4, 13)),
        ("--steps 5 --topk 8 --draft-tokens 64", Shape(5, 8, 64)),
        ("--steps 8 --topk 8", Shape(8, 8, 64)),
        ("--steps 1 --topk 2", Shape(1, 2, 3)),
    ],
)
def test_shapes_by_default(given, shape):
    assert options.shape(options.parse(["x", *given.split()]), "some") == shape


def test_defaults_are_the_demo_pair():
    target, draft = options.pair(options.parse(["x"]))
    assert (target, draft) == (str(options.DEMO / "target"), str(options.DEMO / "draft"))
    assert options.pair(options.parse(["x", "--target", "there"])) == ("there", "none")
