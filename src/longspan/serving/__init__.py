"""The server: an OpenAI-compatible API, sessions and a page. It needs the extra `serve`."""
