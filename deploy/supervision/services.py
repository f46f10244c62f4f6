"""The services of a deployment: the router and the two kinds of worker, as actors run them."""

from collections.abc import Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray.util

from core.channel import ChannelKeys
from core.config import SluiceConfig
from core.key_files import load_keys
from core.lifecycle import Lifecycle
from core.logs import LogFormat
from core.messages import Party, Role
from core.worker_context import WorkerContext
from deploy.model_source import resolve_model
from router.server import RouterContext, run_router


@dataclass(frozen=True, slots=True)
class RouterService:
    """The one router of a deployment."""

    context: RouterContext

    @property
    def name(self) -> str:
        """There is one."""
        return "router"

    @property
    def role(self) -> Party:
        """A router."""
        return "router"

    @property
    def revision(self) -> str:
        """Of its context."""
        return self.context.revision

    @property
    def log_level(self) -> str:
        """As configured."""
        return self.context.config.log_level

    @property
    def log_format(self) -> LogFormat:
        """As configured."""
        return self.context.config.log_format

    def run(self, lifecycle: Lifecycle) -> Coroutine[Any, Any, None]:
        """Serve the API until ``stop``, or until the end of a drain."""
        context = self.context
        return run_router(
            replace(context, keys=keys_of(context.config, "router", context.keys)), lifecycle
        )


@dataclass(frozen=True, slots=True)
class WorkerService:
    """One prefill or decode worker."""

    role: Role
    context: WorkerContext

    @property
    def name(self) -> str:
        """Its worker id."""
        return self.context.worker_id

    @property
    def revision(self) -> str:
        """Of its context."""
        return self.context.revision

    @property
    def log_level(self) -> str:
        """As configured."""
        return self.context.config.log_level

    @property
    def log_format(self) -> LogFormat:
        """As configured."""
        return self.context.config.log_format

    async def run(self, lifecycle: Lifecycle) -> None:
        """Serve until ``stop`` or the end of a drain, on whichever machine Ray has placed it."""
        context = replace(self.with_keys(), model_path=self._model_path(), host=self._host())
        # Imported here: the driver and the router never load torch.
        if self.role == "prefill":
            from prefill.worker import run_prefill  # noqa: PLC0415

            await run_prefill(context, lifecycle)
        else:
            from decode.worker import run_decode  # noqa: PLC0415

            await run_decode(context, lifecycle)

    def with_keys(self) -> WorkerContext:
        """Return the context with the keys of this machine.

        Raises:
            ConfigError: the folder of keys cannot be used.
        """
        keys = keys_of(self.context.config, self.role, self.context.keys)
        return replace(self.context, keys=keys)

    def _model_path(self) -> Path:
        if self.context.model_path.is_dir():
            return self.context.model_path
        model = self.context.config.model
        return resolve_model(model.model, model.revision).path

    def _host(self) -> str:
        """Loopback in a private session, this machine's address in a cluster."""
        return ray.util.get_node_ip_address()


def keys_of(config: SluiceConfig, party: Party, given: ChannelKeys) -> ChannelKeys:
    """Return the keys in the configured folder of this machine, or, without one, those given.

    Raises:
        ConfigError: the folder cannot be used.
    """
    folder = config.security.keys_dir
    return given if folder is None else load_keys(folder, party)
