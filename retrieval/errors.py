"""Every error that leaves this package. Whoever serves it over a network maps these, and only these.

RetrievalError
├── NotFoundError             nothing of that id under this tenant; foreign ids look exactly like unknown ones
├── InvalidValueError         the caller's value is wrong; `path` names the field
├── FileContentError          a file cannot be read; ends as the `last_error` of its ingestion, never as a crash
└── UnavailableError          right, but not now
    ├── StoreUnavailableError     Redis cannot be reached
    └── EmbedderUnavailableError  the embedder's process cannot be reached, or failed
"""

from __future__ import annotations

from typing import Literal

FileErrorCode = Literal["server_error", "unsupported_file", "invalid_file"]


class RetrievalError(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class NotFoundError(RetrievalError):
    pass


class InvalidValueError(RetrievalError):
    def __init__(self, message: str, path: str) -> None:
        super().__init__(message)
        self.path = path


class FileContentError(RetrievalError):
    def __init__(self, message: str, code: FileErrorCode = "invalid_file") -> None:
        super().__init__(message)
        self.code: FileErrorCode = code


class UnavailableError(RetrievalError):
    pass


class StoreUnavailableError(UnavailableError):
    pass


class EmbedderUnavailableError(UnavailableError):
    pass
