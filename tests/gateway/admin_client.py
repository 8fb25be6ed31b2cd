"""The admin API as tests speak it."""

from __future__ import annotations

from typing import Any

import httpx

from tests.gateway.conftest import RunningGateway


class AdminClient:
    def __init__(self, gateway: RunningGateway, key_name: str = "root") -> None:
        self._gateway = gateway
        self._key_name = key_name

    def call(self, method: str, path: str, body: object = None, **query: str | int) -> httpx.Response:
        return self._gateway.http.request(
            method,
            f"/admin/v1/{path}",
            json=body,
            params=query,
            headers=self._gateway.headers(self._key_name),
        )

    def ok(self, method: str, path: str, body: object = None, **query: str | int) -> Any:
        response = self.call(method, path, body, **query)
        assert response.status_code in (200, 201, 204), response.text
        return response.json() if response.content else None

    def new_key(self, tenant: str, name: str, **draft: object) -> str:
        """Makes a key, files it under `name` for `gateway.headers`, and returns its id."""
        made = self.ok("POST", f"tenants/{tenant}/keys", draft)
        self._gateway.keys[name] = made["api_key"]
        key_id: str = made["key"]["id"]
        return key_id
