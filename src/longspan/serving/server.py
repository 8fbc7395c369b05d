"""The parts of a running server: models, their engines and sessions."""

import time
from collections.abc import Mapping

from longspan.serving.models import Models
from longspan.serving.session_table import Sessions
from longspan.serving.settings import Settings
from longspan.text_model import TextModel


class Server:
    def __init__(self, texts: Mapping[str, TextModel], settings: Settings) -> None:
        self.settings = settings
        self.models = Models(texts, settings)
        self.sessions = Sessions(self.models, settings)
        self.started = time.time()
        self.closing = False
        self.scoring = 0
        """Texts that are being scored."""

    def start(self) -> None:
        for served in self.models:
            served.engine.start()

    def close(self, timeout: float | None = None) -> None:
        """Finish what runs, or stop it after `timeout` seconds (default: that of the settings)."""
        self.closing = True
        for served in self.models:
            served.engine.close(self.settings.shutdown_timeout if timeout is None else timeout)
