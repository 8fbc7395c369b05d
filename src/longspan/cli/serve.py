"""`longspan serve`: an HTTP server with an OpenAI-compatible API, sessions and a page."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longspan.cli.options import DeviceName, DtypeName, Threads, machine, note, note_bundled
from longspan.errors import ConfigError, counted, not_read

if TYPE_CHECKING:
    from longspan.text_model import TextModel


def serve(
    models: Annotated[
        list[Path] | None,
        typer.Argument(metavar="MODEL", help="Model folders or folders of training runs. Default: the bundled model."),
    ] = None,
    port: Annotated[int, typer.Option("--port", help="Port; 0 chooses a free one.")] = 8000,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on. Any address except 127.0.0.1 needs an API key.")
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str],
        typer.Option("--allow-host", metavar="NAME", help="Another host name that clients may use; can be repeated."),
    ] = [],  # noqa: B006 (typer copies it)
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--api-key-file", help="A file with the API key. Default: the environment variable LONGSPAN_API_KEY."
        ),
    ] = None,
    sessions: Annotated[
        Path | None,
        typer.Option(
            "--sessions", metavar="FOLDER", help="Folder for saved and idle sessions. Default: a folder in the cache."
        ),
    ] = None,
    rows: Annotated[int, typer.Option("--rows", help="Maximum number of streams to decode at the same time.")] = 32,
    width: Annotated[
        int | None,
        typer.Option(
            "--width", help="Rows per batch; floating-point rounding depends on it. Default: 16 on a CPU, 32 on a GPU."
        ),
    ] = None,
    queue: Annotated[int, typer.Option("--queue", help="Maximum number of streams that wait for a free row.")] = 64,
    max_sessions: Annotated[
        int, typer.Option("--max-sessions", help="Maximum number of sessions, in memory and on disk.")
    ] = 256,
    grace: Annotated[
        float, typer.Option("--grace", help="Seconds that running requests have to finish after SIGTERM.")
    ] = 10.0,
    device: DeviceName = "auto",
    dtype: DtypeName = "auto",
    threads: Threads = 0,
) -> None:
    """Serve models with an OpenAI-compatible API, sessions and a web page."""
    try:
        from longspan.serving.run import serve as run
    except ImportError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "uvicorn", "prometheus_client", "starlette"):
            raise
        raise ConfigError(f"serve needs {error.name}; install it with: pip install 'longspan[serve]'") from None
    from longspan.data.cache import cache_folder
    from longspan.serving.settings import Settings

    settings = Settings(
        host=host,
        port=port,
        allowed_hosts=tuple(allow_host),
        api_key=_api_key(api_key_file),
        rows=rows,
        width=width,
        queue=queue,
        max_sessions=max_sessions,
        shutdown_timeout=grace,
        state_folder=sessions or cache_folder() / "sessions",
    )
    where = machine(device, dtype, threads)
    texts = _load(models or [], str(where.device), str(where.dtype))

    def announce(address: str) -> None:
        note_bundled(models[0] if models else None)
        note(f"serving {', '.join(texts)} at {address} (press Ctrl-C to stop)")

    def stopping(streams: int) -> None:
        note(f"stopping: {counted(streams, 'stream')} may run for another {grace:g} s; press Ctrl-C again to stop now")

    run(texts, settings, announce, stopping)


def _load(models: list[Path], device: str, dtype: str) -> "dict[str, TextModel]":
    """The models by the names of their folders."""
    from longspan.text_model import load

    if not models:
        return {"bundled": load(device=device, dtype=dtype)}
    texts: dict[str, TextModel] = {}
    for path in models:
        name = path.resolve().name
        if name in texts:
            raise ConfigError(f"two models are called {name!r}; rename the folder {path}")
        texts[name] = load(path, device=device, dtype=dtype)
        texts[name].model.require_next_token()
    return texts


def _api_key(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get("LONGSPAN_API_KEY") or None
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError as error:
        raise not_read(f"--api-key-file {path}", error, ConfigError) from None
    except UnicodeDecodeError:
        raise ConfigError(f"--api-key-file {path} is not ASCII; use a key of at least 16 ASCII characters") from None
