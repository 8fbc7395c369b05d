"""Settings of the server."""

from dataclasses import dataclass, field
from pathlib import Path

from longspan.errors import ConfigError

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Limits and addresses. Sizes are in bytes, times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    allowed_hosts: tuple[str, ...] = ()
    """Names besides the local ones that a Host header may have."""
    api_key: str | None = field(default=None, repr=False)
    width: int | None = None
    """Rows per batch. Fixed, because rounding depends on it. Default: 16, on a GPU 32."""
    rows: int = 32
    """Streams that are decoded at the same time."""
    queue: int = 64
    """Streams that may wait for a row."""
    retry_after: int = 1
    """Seconds that a refused client is asked to wait."""
    max_scoring: int = 4
    """Texts that are scored at the same time."""
    max_prompt_tokens: int = 1 << 20
    max_tokens: int = 1 << 16
    max_choices: int = 64
    """Prompts times best_of of one request."""
    max_body: int = 8 << 20
    max_upload: int = 512 << 20
    """A session from another machine."""
    max_header: int = 16 << 10
    header_timeout: float = 10.0
    """Time to send the headers of a request."""
    body_timeout: float = 20.0
    """Time to send a body."""
    request_timeout: float = 3600.0
    """Time to answer a request."""
    shutdown_timeout: float = 10.0
    """Time for running requests to finish after SIGTERM. Sessions are saved afterwards."""
    state_folder: Path | None = None
    """Folder of saved and idle sessions. Without it sessions stay in memory."""
    max_sessions: int = 256
    max_session_age: float = 7 * 86400.0
    """A session that was not used for this long is deleted."""
    max_state_bytes: int = 4 << 30
    """Sessions in memory; those used longest ago move to disk."""
    max_disk_bytes: int = 16 << 30
    idle_after: float = 300.0
    """A session that was not used for this long moves to disk."""

    def __post_init__(self) -> None:
        if self.host not in LOCAL and not self.api_key:
            raise ConfigError(
                f"host={self.host!r} can be reached from other machines, so it needs an API key; set "
                "LONGSPAN_API_KEY or --api-key-file, or use 127.0.0.1"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be between 0 and 65535")
        if self.api_key is not None and not (self.api_key.isascii() and len(self.api_key) >= 16):
            raise ConfigError("the API key must be ASCII and have at least 16 characters")
        for name in ("width", "rows", "queue", "max_tokens", "max_prompt_tokens", "max_choices", "max_sessions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} must be at least 1")
