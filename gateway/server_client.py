"""A running server as its operator's own tools reach it: on this machine, with the metrics' token."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Mapping

from prometheus_client.parser import text_string_to_metric_families

from engine.errors import EngineUnavailableError
from engine.settings import Settings
from gateway.metrics_routes import load_or_create_metrics_token
from gateway.supervisor import DIRECT, local_url

Samples = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
_SECONDS = 10.0


class ServerClient:
    def __init__(self, settings: Settings) -> None:
        self.url = local_url(settings)
        self._token = load_or_create_metrics_token(settings.security.metrics_token, settings.store.data_dir)

    def get(self, path: str, *, any_status: bool = False) -> bytes:
        """Raises EngineUnavailableError when nobody answers, or answers otherwise than with 200."""
        request = urllib.request.Request(f"{self.url}{path}", headers={"authorization": f"Bearer {self._token}"})
        try:
            with DIRECT.open(request, timeout=_SECONDS) as response:
                body: bytes = response.read()
                return body
        except urllib.error.HTTPError as error:
            if any_status:
                return error.read()
            raise EngineUnavailableError(f"{self.url}{path}: {error}") from error
        except (urllib.error.URLError, ConnectionError, TimeoutError) as error:
            raise EngineUnavailableError(f"{self.url}{path}: {error}") from error

    def samples(self, path: str) -> Samples:
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(self.get(path).decode())
            for sample in family.samples
        }
