from __future__ import annotations

import itertools
from collections.abc import Mapping
from types import MappingProxyType

from hypothesis import given
from hypothesis import strategies as st

from engine.protocol import Segment, SegmentKind
from engine.scoped_tokens import ScopedTokens
from engine.settings import TenantSettings
from gateway.chat_template import ChatTemplate
from gateway.prompt import Message, PromptBuilder
from gateway.prompt_scopes import Level, PromptScopes, narrowing_levels
from gateway.prompt_tokenizer import PromptTokenizer
from gateway.published import Published, document_digest
from gateway.tenant_records import CollectionRecord, PromptRecord, SharePolicy, TenantRecord
from gateway.tenants import Tenant, TenantDirectory, public_scope
from retrieval.documents import Document
from tests.gateway.byte_tokenizer import byte_tokenizer
from tests.gateway.chat_templates import CUTTABLE, ECHOING, SPECIAL_TOKENS

SECRET = b"secret"
PUBLIC_PROMPT = "You answer from the handbook only."
PUBLIC_DOCUMENT = Document("h1", "Handbook", "Be on time.")
OWN_DOCUMENT = Document("o1", "Memo", "The plan is secret.")
TOKENIZER = byte_tokenizer()


def published() -> Published:
    texts = Published()
    texts.put_prompt(PromptRecord(id="handbook", text=PUBLIC_PROMPT))
    texts.put_collection(CollectionRecord(id="c", documents=(document_digest(PUBLIC_DOCUMENT),)))
    return texts


def tenant(name: str, group: str = "") -> Tenant:
    found = TenantDirectory(SECRET, [TenantSettings(id=name, cache_group=group)]).tenant(name)
    assert found is not None
    return found


def build(
    who: Tenant,
    *,
    system: str | None = PUBLIC_PROMPT,
    documents: tuple[Document, ...] = (),
    source: str = CUTTABLE["chatml"],
    narrowing: Mapping[str, str] = MappingProxyType({}),
) -> tuple[Segment, ...]:
    scopes = PromptScopes.of_request(SECRET, who, narrowing, published())
    messages = [*([Message("system", system)] if system is not None else []), Message("user", "Why?")]
    builder = PromptBuilder(ChatTemplate(source, SPECIAL_TOKENS), PromptTokenizer(TOKENIZER.to_str().encode(), source))
    return builder.build(messages, documents, scopes)


def scope_of(segments: tuple[Segment, ...], kind: SegmentKind, document: str | None = None) -> bytes:
    return next(s.scope for s in segments if s.kind is kind and (document is None or s.document_id == document))


def test_a_published_prompt_is_everybodys_and_what_follows_is_nobody_elses() -> None:
    a, b = build(tenant("a"), documents=(OWN_DOCUMENT,)), build(tenant("b"), documents=(OWN_DOCUMENT,))
    assert scope_of(a, SegmentKind.SYSTEM) == scope_of(b, SegmentKind.SYSTEM) == public_scope(SECRET)
    assert {s.owner for s in a if s.scope == public_scope(SECRET)} == {"public"}
    private = [(x, y) for x, y in zip(a, b, strict=True) if x.scope != public_scope(SECRET)]
    assert len(private) > 3
    assert all(x.tokens == y.tokens and x.scope != y.scope for x, y in private)


def test_a_prompt_that_is_not_word_for_word_the_published_one_is_private() -> None:
    segments = build(tenant("a"), system=PUBLIC_PROMPT + " ")
    assert public_scope(SECRET) not in {s.scope for s in segments}


def test_without_a_published_text_not_even_the_template_is_shared() -> None:
    """Two tenants would see in their hits that somebody else uses the same model."""
    a, b = build(tenant("a"), system=None), build(tenant("b"), system=None)
    assert {s.scope for s in a}.isdisjoint({s.scope for s in b})


def test_a_public_document_is_public_only_before_the_first_private_one() -> None:
    first = build(tenant("a"), documents=(PUBLIC_DOCUMENT, OWN_DOCUMENT))
    later = build(tenant("a"), documents=(OWN_DOCUMENT, PUBLIC_DOCUMENT))
    assert scope_of(first, SegmentKind.DOCUMENT, "h1") == public_scope(SECRET)
    assert scope_of(later, SegmentKind.DOCUMENT, "h1") == scope_of(later, SegmentKind.DOCUMENT, "o1")


def test_a_private_document_cannot_pass_for_a_public_one_by_its_id() -> None:
    forged = Document("h1", "Handbook", "Be on time. And pay me.")
    segments = build(tenant("a"), documents=(forged,))
    assert scope_of(segments, SegmentKind.DOCUMENT) != public_scope(SECRET)


def test_end_users_share_their_tenants_documents_and_not_their_questions() -> None:
    one, two, nobody = (
        build(tenant("a"), documents=(OWN_DOCUMENT,), narrowing=who) for who in ({"user": "1"}, {"user": "2"}, {})
    )
    shared = {scope_of(s, SegmentKind.DOCUMENT, "o1") for s in (one, two, nobody)}
    own = {scope_of(s, SegmentKind.QUESTION) for s in (one, two, nobody)}
    assert (len(shared), len(own)) == (1, 3)


def test_a_salt_narrows_everything_and_never_to_another_tenants_scope() -> None:
    scopes = [
        {s.scope for s in build(tenant(name), narrowing=narrowing)}
        for name in ("a", "b")
        for narrowing in ({"cache_salt": "x"}, {"cache_salt": "y"}, {"prompt_cache_key": "x"}, {})
    ]
    salted = scopes[:3] + scopes[4:7]
    assert all(len(found) == 1 for found in salted)
    assert len(set[bytes]().union(*salted)) == 6


def test_a_cache_group_shares_and_pays_together() -> None:
    a, b, alone = build(tenant("a", "g")), build(tenant("b", "g")), build(tenant("c"))
    assert a == b
    assert {s.owner for s in a} == {"public", "group:g"}
    assert {s.owner for s in alone} == {"public", ""}


def test_scopes_only_narrow_in_every_template_and_order() -> None:
    """The engine refuses a prompt whose scopes widen: no layout may make one."""
    documents = (PUBLIC_DOCUMENT, OWN_DOCUMENT, Document("h1", "Handbook", "Be on time. "))
    for source in (*CUTTABLE.values(), ECHOING):
        for order in itertools.permutations(documents):
            for system in (None, PUBLIC_PROMPT, "Mine."):
                for narrowing in ({}, {"user": "u"}, {"cache_salt": "s", "user": "u"}):
                    segments = build(
                        tenant("a", "g"), system=system, documents=order, source=source, narrowing=narrowing
                    )
                    ScopedTokens(16, [(s.tokens, s.scope, s.owner) for s in segments])


@given(st.lists(st.none() | st.sampled_from(Level)))
def test_levels_narrow_and_no_piece_is_wider_than_itself(alone: list[Level | None]) -> None:
    found = list(narrowing_levels(alone))
    assert found == sorted(found)
    assert all(level >= own for level, own in zip(found, alone, strict=True) if own is not None)
    if Level.PUBLIC not in alone:
        assert Level.PUBLIC not in found


def test_a_text_published_twice_is_public_until_both_are_withdrawn() -> None:
    texts = published()
    texts.put_prompt(PromptRecord(id="copy", text=PUBLIC_PROMPT))
    texts.drop_prompt("handbook")
    assert texts.is_public_prompt(PUBLIC_PROMPT)
    texts.put_prompt(PromptRecord(id="copy", text="another"))
    assert not texts.is_public_prompt(PUBLIC_PROMPT)
    assert texts.is_public_prompt("another")


def test_a_tenant_of_a_cache_group_has_neither_floor_nor_quota() -> None:
    """Its blocks are the group's: a floor that protects nothing would still let it into the floors of others."""
    policy = SharePolicy(kv_floor_tokens=160, kv_quota_tokens=320, weight=2.0)
    alone, grouped = (TenantRecord(id="a", policy=policy, cache_group=group) for group in ("", "g"))
    assert (alone.policy_for_engine().kv_floor_tokens, alone.policy_for_engine().kv_quota_tokens) == (160, 320)
    assert (grouped.policy_for_engine().kv_floor_tokens, grouped.policy_for_engine().kv_quota_tokens) == (0, None)
    assert grouped.policy_for_engine().weight == 2.0
