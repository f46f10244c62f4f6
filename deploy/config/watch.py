"""A config file that is looked at again and again, and what is done with its changes."""

import logging
from collections.abc import Callable
from pathlib import Path

from core.config import SluiceConfig
from core.errors import ConfigError, SluiceError

log = logging.getLogger(__name__)


class ConfigWatch:
    """Hands each change of ``file`` on once. The file may be replaced, or away for a while."""

    def __init__(self, file: Path, load: Callable[[], SluiceConfig]) -> None:
        """Know nothing yet: what the file holds at the first look is handed on.

        Args:
            file: The config file.
            load: Reads and checks it, and whatever else the config comes from.
        """
        self._file = file
        self._load = load
        self._known: bytes | None = None
        self._last_seen: bytes | None = None

    def look(self, apply: Callable[[SluiceConfig], str | None]) -> None:
        """Hand a changed config to ``apply``, which returns why it cannot be, or None.

        Only at the second look that finds the same: a file that is being written may hold a
        beginning that is a config, too, and nothing is one that is all defaults.

        A change that is invalid or cannot be is logged once. One that ``apply`` could not take,
        by a ``SluiceError``, is handed to it again at the next look.
        """
        content = self._content()
        is_settled = content == self._last_seen or self._known is None
        self._last_seen = content
        if content is None or content == self._known or not is_settled:
            return
        try:
            config = self._load()
            if self._content() != content:
                return  # what was loaded is another one, or a part
            refusal = apply(config)
        except ConfigError as error:
            refusal = str(error)
        except SluiceError as error:
            log.warning("event=config_waits reason=%s", error)
            return
        self._known = content
        if refusal is None:
            log.info("event=config_applied file=%s", self._file)
        else:
            log.error("event=config_ignored file=%s reason=%s", self._file, refusal)

    def _content(self) -> bytes | None:
        try:
            return self._file.read_bytes()
        except OSError:
            return None
