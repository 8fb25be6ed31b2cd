"""Any interleaving of what happens to keys and tenants, against plain words, on two gateways over one store.

    gateway one   makes the changes, and takes each over at once
    gateway two   looks at the log now and then; at every look it must agree

What a key may do is asked of `authenticate` itself, at the machine's own time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from engine.errors import AuthenticationError, ConflictError
from gateway.audit_log import Actor
from gateway.auth import authenticate
from gateway.directory_sync import DirectorySync
from gateway.store_client import StoreClient
from gateway.tenant_admin import KeyDraft, NewKey, TenantAdmin, TenantDraft, TenantPatch
from gateway.tenant_records import Role
from gateway.tenants import TenantDirectory
from tests.gateway.store_server import StoreServer

pytestmark = pytest.mark.redis

T = TypeVar("T")
SECRET = b"a secret for tests"
TENANTS = ("acme", "borealis")
OPERATOR = Actor(name="test")


@dataclass
class Model:
    """What has been done to one key."""

    id: str
    tenant: str
    role: Role
    ends: float | None
    revoked: bool = False
    rotated: bool = False

    def works(self, now: float, disabled: set[str]) -> bool:
        return not self.revoked and self.tenant not in disabled and (self.ends is None or now < self.ends)


class KeyMachine(RuleBasedStateMachine):
    def __init__(self, store: StoreClient, runner: asyncio.Runner) -> None:
        super().__init__()
        self.runner = runner
        self.now = 1_700_000_000.0
        self.directories = [TenantDirectory(SECRET, []) for _ in range(2)]
        self.one, self.two = (DirectorySync(store, directory) for directory in self.directories)
        self.admin = TenantAdmin(store, SECRET, self.one.poll, lambda: self.now)
        self.disabled: set[str] = set()
        self.keys: dict[str, Model] = {}  # by the key itself
        for name in TENANTS:
            self.run(self.admin.create_tenant(OPERATOR, TenantDraft(id=name)))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def add(self, new: NewKey, tenant: str, role: Role, ends: float | None) -> None:
        assert new.api_key not in self.keys
        assert new.api_key[:-4] not in repr(new.record), "a record must not hold the key"
        self.keys[new.api_key] = Model(new.record.id, tenant, role, ends)

    def draw(self, data: st.DataObject) -> Model:
        return list(self.keys.values())[
            data.draw(st.integers(0, len(self.keys) - 1))
        ]  # keys are random, places are not

    @rule(tenant=st.sampled_from(TENANTS), role=st.sampled_from(Role), lifetime=st.none() | st.integers(1, 100))
    def create(self, tenant: str, role: Role, lifetime: int | None) -> None:
        draft = KeyDraft(role=role, expires_in_seconds=lifetime)
        new = self.run(self.admin.create_key(OPERATOR, tenant, draft))
        self.add(new, tenant, role, None if lifetime is None else self.now + lifetime)

    @precondition(lambda self: self.keys)
    @rule(data=st.data(), grace=st.integers(0, 60))
    def rotate(self, data: st.DataObject, grace: int) -> None:
        """The new key lives as long as the old one would have; the old one no longer than that, or than the grace."""
        old = self.draw(data)
        call = self.admin.rotate_key(OPERATOR, old.tenant, old.id, grace)
        if old.rotated or old.revoked or (old.ends is not None and self.now >= old.ends):
            with pytest.raises(ConflictError):
                self.run(call)
            return
        self.add(self.run(call), old.tenant, old.role, old.ends)
        old.rotated = True
        old.ends = min(self.now + grace, old.ends or self.now + grace)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        key = self.draw(data)
        self.run(self.admin.revoke_key(OPERATOR, key.tenant, key.id))
        key.revoked = True

    @rule(tenant=st.sampled_from(TENANTS), disabled=st.booleans())
    def switch(self, tenant: str, disabled: bool) -> None:
        self.run(self.admin.update_tenant(OPERATOR, tenant, TenantPatch(disabled=disabled)))
        (self.disabled.add if disabled else self.disabled.discard)(tenant)

    @rule(seconds=st.integers(1, 50))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def look(self) -> None:
        self.run(self.two.poll())
        self.agrees(self.directories[1])

    @invariant()
    def gateway_one_agrees(self) -> None:
        self.agrees(self.directories[0])

    def agrees(self, directory: TenantDirectory) -> None:
        for key, model in self.keys.items():
            if model.works(self.now, self.disabled):
                caller = authenticate(directory, f"Bearer {key}", self.now)
                assert (caller.tenant.id, caller.key.id, caller.key.role) == (model.tenant, model.id, model.role)
            else:
                with pytest.raises(AuthenticationError) as refused:
                    authenticate(directory, f"Bearer {key}", self.now)
                assert key[:-4] not in refused.value.message


def test_two_gateways_follow_the_life_of_every_key(store_server: StoreServer) -> None:
    with asyncio.Runner() as runner:
        store = StoreClient(store_server.url, timeout=10)

        def machine() -> KeyMachine:
            store_server.command("FLUSHALL")
            return KeyMachine(store, runner)

        run_state_machine_as_test(
            cast("type[KeyMachine]", machine),
            settings=settings(
                max_examples=25,
                stateful_step_count=30,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
            ),
        )
        runner.run(store.close())
