"""``sluice serve``: run a deployment until Ctrl-C or SIGTERM."""

from rich.console import Console

from core.config import SluiceConfig
from core.logs import set_up_logging
from deploy.deployment import running
from deploy.driver import tell
from deploy.supervision.stop_signals import StopInterrupt


def run_serve(config: SluiceConfig) -> int:
    """Serve until stopped, and return 0 after a stop that was asked for.

    Raises:
        ConfigError: nothing was started, or it was ended again.
        SluiceError: the deployment broke for good.
    """
    set_up_logging(config.log_level, worker="deploy", role="deploy", log_format=config.log_format)
    # Whatever reads JSON finds nothing else on the stream; the log tells the same.
    console = Console(stderr=True, quiet=config.log_format == "json")
    try:
        with running(config, console) as deployment:
            url = f"{deployment.url}/v1"
            is_detached = config.deploy.lifetime == "detached"
            how_it_ends = "" if is_detached else " (Ctrl-C stops)"
            tell(console, f"serving at {url}{how_it_ends}", "serving", url)
            if is_detached:
                deployment.leave()
            else:
                deployment.wait_for_stop()
    except StopInterrupt:
        pass
    return 0
