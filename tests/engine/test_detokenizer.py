"""IncrementalDetokenizer: the deltas joined are the tokenizer's own decoding, cut at the stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from engine.detokenizer import IncrementalDetokenizer, special_token_ids
from engine.errors import ModelLoadError

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The theatre is there, then.",
    "Füße, naïve café, Ελληνικά, русский текст, עברית, العربية, 日本語の文章, 한국어",
    "def decode(self, ids): return ''.join(ids)  # 🙂🙃👩‍👩‍👧",
]


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|tool|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("an added é token")])
    return tokenizer


def unigram(pieces: Sequence[str]) -> Tokenizer:
    return Tokenizer(models.Unigram([(piece, -float(len(piece) == 1)) for piece in pieces], unk_id=0))


def metaspace_tokenizer(prepend_scheme: str = "always") -> Tokenizer:
    characters = sorted(set("".join(CORPUS)) - {" "})
    tokenizer = unigram(["<unk>", "<s>", "▁", "▁the", "▁▁", "he", "re▁", *characters])
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    return tokenizer


def byte_fallback_tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    """Llama 2's shape: unknown characters become <0xNN> tokens, one for each byte of their UTF-8."""
    pieces = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁▁", *"abcdefgh▁é"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    return tokenizer


def llama_decoder() -> decoders.Decoder:
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(stages)


def fused_first_decoder() -> decoders.Decoder:
    stages = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(stages)


def gemma_decoder() -> decoders.Decoder:
    return decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def late_replace_decoder() -> decoders.Decoder:
    """Replaced too early, "<" would destroy the byte tokens."""
    return decoders.Sequence([decoders.ByteFallback(), decoders.Replace("<", "("), decoders.Fuse()])


BYTE_LEVEL = byte_level_tokenizer()
TOKENIZERS = {
    "byte-level": BYTE_LEVEL,
    "metaspace": metaspace_tokenizer(),
    "metaspace-never": metaspace_tokenizer("never"),
    "llama": byte_fallback_tokenizer(llama_decoder()),
    "fused-first": byte_fallback_tokenizer(fused_first_decoder()),
    "gemma": byte_fallback_tokenizer(gemma_decoder()),
    "late-replace": byte_fallback_tokenizer(late_replace_decoder()),
}

every_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
texts = st.text(max_size=30) | st.text(st.sampled_from("the re▁é日🙂👩‍\u0301\ufffd\n"), max_size=30)
byte_level_ids = st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() + 2), max_size=40)


def deltas(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> list[str]:
    """What a client is sent: up to the stop string, then the rest."""
    sent: list[str] = []
    for token_id in token_ids:
        sent.append(detokenizer.push(token_id))
        if detokenizer.stopped is not None:
            break
    return [*sent, detokenizer.flush()]


def detokenizer_of(tokenizer: Tokenizer, stop: Sequence[str] = ()) -> IncrementalDetokenizer:
    return IncrementalDetokenizer(tokenizer, stop=stop, skip_token_ids=special_token_ids(tokenizer))


def ids_of(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[int]:
    vocab = tokenizer.get_vocab()
    return [vocab[token] for token in tokens]


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The dumb model: read character by character, stop at the first complete stop string, prefer the longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@every_tokenizer
@settings(max_examples=150, deadline=None)
@given(text=texts)
@example(text="  the  there ")
@example(text="👩‍👩‍👧 e\u0301")
def test_deltas_join_to_the_tokenizers_own_decoding(tokenizer: Tokenizer, text: str) -> None:
    """A leading space lost or doubled, a character cut between two tokens: each shows as a different text."""
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert "".join(deltas(detokenizer_of(tokenizer), token_ids)) == tokenizer.decode(token_ids)


@settings(max_examples=400, deadline=None)
@given(token_ids=byte_level_ids)
def test_any_token_ids_join_to_the_tokenizers_own_decoding(token_ids: list[int]) -> None:
    """Bytes that are no UTF-8, added and special tokens, ids beyond the vocabulary: a sampled model emits them all."""
    assert "".join(deltas(detokenizer_of(BYTE_LEVEL), token_ids)) == BYTE_LEVEL.decode(token_ids)


SENTENCEPIECE = ["metaspace", "metaspace-never", "llama", "fused-first", "gemma"]


@pytest.mark.parametrize("name", SENTENCEPIECE)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_sentencepiece_token_ids_join_to_the_tokenizers_own_decoding(name: str, data: st.DataObject) -> None:
    """Only the head of the text loses its space, and a special token in front is not the head."""
    tokenizer = TOKENIZERS[name]
    vocab = sorted(token_id for token, token_id in tokenizer.get_vocab().items() if not token.startswith("<0x"))
    token_ids = data.draw(st.lists(st.sampled_from([*vocab, len(vocab) + 1000]), max_size=20))
    assert "".join(deltas(detokenizer_of(tokenizer), token_ids)) == tokenizer.decode(token_ids)


@every_tokenizer
@settings(max_examples=150, deadline=None)
@given(text=texts, data=st.data())
def test_the_text_ends_where_the_first_complete_stop_string_begins(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    """Whatever cuts the tokens make; stop strings that overlap, contain each other, begin alike."""
    token_ids = tokenizer.encode(text, add_special_tokens=False).ids
    full = tokenizer.decode(token_ids)
    assume(full)
    starts = st.integers(0, len(full) - 1)
    pieces = st.builds(lambda start, length: full[start : start + length], starts, st.integers(1, 6))
    stops = data.draw(st.lists(pieces | st.text("the r", min_size=1, max_size=4), min_size=1, max_size=4))
    detokenizer = detokenizer_of(tokenizer, stops)
    sent = "".join(deltas(detokenizer, token_ids))
    assert (sent, detokenizer.stopped) == cut_at_stop(full, stops)


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=7), min_size=1, max_size=3),
    honoured_from=st.integers(0, 30),
)
def test_only_what_may_still_become_a_match_is_held_back(text: str, stops: list[str], honoured_from: int) -> None:
    """Periodic stop strings ("aab" in "aaaab"). Less held back leaks a stop string, more delays the stream."""
    detokenizer = detokenizer_of(BYTE_LEVEL, stops)
    sent = ""
    for index, token_id in enumerate(ids_of(BYTE_LEVEL, text)):
        sent += detokenizer.push(token_id, honour_stop=index >= honoured_from)
        so_far = text[: index + 1]
        matches = [stop for stop in stops if so_far.endswith(stop)]
        if matches and index >= honoured_from:
            longest = max(matches, key=len)
            assert (sent, detokenizer.stopped) == (so_far.removesuffix(longest), longest)
            assert detokenizer.flush() == ""
            return
        prefixes = [stop[:length] for stop in stops for length in range(len(stop))]
        longest = max((prefix for prefix in prefixes if so_far.endswith(prefix)), key=len)
        assert sent == so_far.removesuffix(longest)
    assert detokenizer.stopped is None
    assert sent + detokenizer.flush() == text


def test_a_character_is_sent_with_the_token_that_completes_it_and_not_before() -> None:
    """A delta with U+FFFD in it cannot be taken back."""
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str("é🙂")[0][0]
    detokenizer = detokenizer_of(BYTE_LEVEL)
    assert [detokenizer.push(token_id) for token_id in ids_of(BYTE_LEVEL, letters)] == ["", "é", "", "", "", "🙂"]


def byte_ids(data: bytes) -> list[int]:
    return ids_of(TOKENIZERS["llama"], [f"<0x{byte:02X}>" for byte in data])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\xf0\x9f\x99", ["", "", "", "\ufffd"]),  # open at the end: at flush
        (b"\xff\xff\xff", ["\ufffd", "\ufffd", "\ufffd", ""]),  # never a beginning: at once
        (b"\xe2\x82a", ["", "", "\ufffda", ""]),  # proven invalid by the next byte
        (b"\xe2\x82\xac\xff", ["", "", "€", "\ufffd", ""]),  # what was sent stays
    ],
)
def test_invalid_bytes_are_replaced_as_soon_as_they_are_proven_invalid(data: bytes, expected: list[str]) -> None:
    """Waiting for a text that does not end with U+FFFD, a stream of such bytes never sends anything."""
    assert deltas(detokenizer_of(TOKENIZERS["llama"]), byte_ids(data)) == expected


def test_an_open_character_does_not_swallow_the_special_token_rule_or_the_stop() -> None:
    """Special tokens are hidden even between the bytes of one character, as `decode` does it."""
    detokenizer = detokenizer_of(BYTE_LEVEL, ["é"])
    assert [detokenizer.push(token_id) for token_id in ids_of(BYTE_LEVEL, ["Ã", "<|end|>", "©"])] == ["", "", ""]
    assert detokenizer.stopped == "é"


def test_bytes_after_the_stop_string_do_not_leak_at_flush() -> None:
    """One token may complete the stop string and open a character that never ends."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "â": 1, "aâ": 2}, [("a", "â")]))
    tokenizer.decoder = decoders.ByteLevel()
    detokenizer = detokenizer_of(tokenizer, ["a"])
    assert deltas(detokenizer, [2]) == ["", ""]
    assert detokenizer.stopped == "a"


def test_special_tokens_are_hidden_and_other_added_tokens_shown() -> None:
    end, tool, think = ids_of(BYTE_LEVEL, ["<|end|>", "<|tool|>", "<think>"])
    assert special_token_ids(BYTE_LEVEL) == {end, tool}
    assert deltas(detokenizer_of(BYTE_LEVEL), [end, think, tool]) == ["", "<think>", "", ""]
    shown = IncrementalDetokenizer(BYTE_LEVEL, skip_token_ids=frozenset())
    assert deltas(shown, [end]) == ["<|end|>", ""]


def test_a_stop_string_begun_before_min_tokens_and_completed_after_is_honoured() -> None:
    """Its beginning must have been held back, although it could not yet have stopped anything."""
    e, n, d = ids_of(BYTE_LEVEL, "end")
    detokenizer = detokenizer_of(BYTE_LEVEL, ["end"])
    unhonoured = [detokenizer.push(token_id, honour_stop=False) for token_id in (e, n, d, e, n)]
    assert "".join(unhonoured) == "end"
    assert detokenizer.push(d) == ""
    assert detokenizer.stopped == "end"
    with pytest.raises(AssertionError, match="after the stop string"):
        detokenizer.push(d)


def test_a_tokenizer_without_decoder_is_words_between_spaces() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    token_ids = [0, 1, 7, 1, 2]
    assert deltas(detokenizer_of(tokenizer), token_ids) == ["a", " b", "", " b", " ?", ""]
    assert tokenizer.decode(token_ids) == "a b b ?"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Sequence([decoders.Replace(Regex("a+"), "x"), decoders.Fuse()]),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("ab", " ")]),
        decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]),
        decoders.Sequence([decoders.Fuse(), decoders.ByteFallback()]),
        decoders.Sequence([decoders.Replace("a", "b"), decoders.ByteLevel()]),
    ],
    ids=str,
)
def test_a_decoder_that_looks_beyond_one_token_is_refused(decoder: decoders.Decoder) -> None:
    """Followed all the same it would stream another text than `decode` gives."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.decoder = decoder
    with pytest.raises(ModelLoadError, match="cannot be followed token by token"):
        IncrementalDetokenizer(tokenizer)


def test_the_size_of_the_output_does_not_reach_a_push() -> None:
    """Ten thousand bytes of nonsense, then text: nothing of them is kept (a decode window would have kept them all)."""
    detokenizer = detokenizer_of(TOKENIZERS["llama"], ["abab"])
    for token_id in byte_ids(b"\xffa") * 5000:
        detokenizer.push(token_id)
    kept = [value for value in vars(detokenizer).values() if isinstance(value, str | list)]
    assert sum(map(len, kept)) <= len("abab")
