"""A real tokenizer of the `tokenizers` library, small enough to build in a test: a token is a byte."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = (
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
)


def byte_tokenizer(unflagged: tuple[str, ...] = ()) -> Tokenizer:
    """256 bytes, then CONTROL as special tokens, then `unflagged`: added tokens that are not flagged special."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in CONTROL])
    tokenizer.add_tokens([AddedToken(token, special=False) for token in unflagged])
    return tokenizer
