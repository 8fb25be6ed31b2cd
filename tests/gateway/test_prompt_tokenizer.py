from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.protocol import unpack_tokens
from gateway.prompt_tokenizer import PromptTokenizer, TokenCache
from tests.gateway.byte_tokenizer import byte_tokenizer


def sentencepiece_like(prefix: str) -> Tokenizer:
    """A tokenizer with SentencePiece's dummy prefix, in both ways in which converted models write it."""
    pieces = ["▁", "a", "b", "▁a", "▁b", "[", "]"]
    merges = [("▁", "a"), ("▁", "b")]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=merges))
    if prefix == "normalizer":
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    return tokenizer


@pytest.mark.parametrize("prefix", ["normalizer", "pre_tokenizer"])
def test_no_space_is_put_before_a_segment_in_the_middle_of_a_prompt(prefix: str) -> None:
    """SentencePiece prefixes its input with a space; at every seam that would be a space nobody wrote."""
    tokenizer = sentencepiece_like(prefix)
    prompts = PromptTokenizer(tokenizer.to_str().encode(), "<s>{{ x }}")
    assert unpack_tokens(prompts.text_tokens("a", b"s")) == [tokenizer.token_to_id("a")]
    assert unpack_tokens(prompts.text_tokens(" a", b"s")) == [tokenizer.token_to_id("▁a")]
    assert unpack_tokens(prompts.template_tokens("b", begins=False)) == [tokenizer.token_to_id("b")]


def test_the_beginning_of_a_prompt_is_tokenized_as_the_tokenizer_does() -> None:
    tokenizer = sentencepiece_like("normalizer")
    prompts = PromptTokenizer(tokenizer.to_str().encode(), "")
    expected = tokenizer.encode("<s>a", add_special_tokens=False).ids
    assert unpack_tokens(prompts.template_tokens("<s>a", begins=True)) == expected


@pytest.mark.parametrize("prefix", ["normalizer", "pre_tokenizer"])
def test_a_clients_text_at_the_beginning_is_what_the_tokenizer_makes_of_it_but_for_special_tokens(prefix: str) -> None:
    """A raw prompt without its <s>, or without the dummy prefix, is no text that the model was trained on."""
    tokenizer = sentencepiece_like(prefix)
    special = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", special)])
    prompts = PromptTokenizer(tokenizer.to_str().encode(), "")
    ids = unpack_tokens(prompts.beginning + prompts.opening_tokens("a b", b"s"))
    assert ids == tokenizer.encode("a b").ids
    assert ids[:2] == [special, tokenizer.token_to_id("▁a")]
    assert special not in unpack_tokens(prompts.opening_tokens("<s>a", b"s"))
    assert PromptTokenizer(sentencepiece_like(prefix).to_str().encode(), "").beginning == b""


def test_a_rendering_with_clients_texts_is_cached_for_its_scope_and_apart_from_plain_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cached for everybody, a whole prompt would tell one tenant, by the time it takes, what another has asked. And
    what is a special token in a rendering must not become one in the same text of a client."""
    namespaces: list[bytes] = []
    put = TokenCache.put

    def note_and_put(cache: TokenCache, namespace: bytes, text: str, tokens: bytes) -> None:
        namespaces.append(namespace)
        put(cache, namespace, text, tokens)

    monkeypatch.setattr(TokenCache, "put", note_and_put)
    tokenizer = byte_tokenizer()
    prompts = PromptTokenizer(tokenizer.to_str().encode(), "")
    special = tokenizer.token_to_id("<s>")
    for scope in (b"alice", b"bob"):
        assert unpack_tokens(prompts.rendering_tokens("<s>", scope)) == [special]
        assert special not in unpack_tokens(prompts.text_tokens("<s>", scope))
    assert len(set(namespaces)) == 4
    assert [b"alice" in name for name in namespaces] == [True, True, False, False]


def test_the_token_cache_forgets_the_least_recently_used_and_counts_right() -> None:
    cache = TokenCache(max_characters=40)
    for name in "abcd":
        cache.put(b"", name * 10, name.encode())
    assert cache.get(b"", "a" * 10) == b"a"
    cache.put(b"", "d" * 10, b"d")  # again: counted once
    cache.put(b"", "e" * 10, b"e")
    assert [cache.get(b"", name * 10) for name in "abcde"] == [b"a", None, b"c", b"d", b"e"]
    assert len(cache) == 4


def test_a_text_that_would_empty_the_cache_is_not_kept() -> None:
    """A text larger than a quarter of the cache would empty it: it is not kept."""
    cache = TokenCache(max_characters=40)
    cache.put(b"", "x" * 11, b"")
    assert len(cache) == 0


def test_one_scopes_texts_are_not_looked_up_in_another() -> None:
    """A shared entry would tell one tenant, by the time it takes, what another has sent."""
    cache = TokenCache(max_characters=40)
    cache.put(b"alice", "text", b"1")
    assert cache.get(b"bob", "text") is None
