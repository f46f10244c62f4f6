"""A folder with a deployment's keys, such as a mounted Kubernetes secret.

    router.key    router.pub
    prefill.key   prefill.pub
    decode.key    decode.pub   decode-2.pub ...

Each file holds one key, 40 characters of Z85, and a line end. A process needs its own ``.key`` and
every party's ``.pub``. While keys are rotated a party has further ones, ``PARTY-ANYTHING.pub``,
all of them good. Public keys are read again while the process runs; secret ones when it starts.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from core.channel_keys import PARTIES, ChannelKeys, DeploymentKeys, KeyPair, PublicKey
from core.errors import ConfigError
from core.messages import Party

log = logging.getLogger(__name__)

KEY_NCHARS = 40
RELOAD_INTERVAL_S = 1.0
FIELD = "security.keys_dir"
WHOLE_SET = (
    "copy it from another machine of the deployment, or let 'sluice keys DIR' make a whole new set "
    "in an empty folder and replace all files, everywhere"
)


class PublicKeyFolder:
    """The public keys in a folder, at most ``RELOAD_INTERVAL_S`` old when they are asked for.

    A folder that cannot be read any more, or not as a whole, changes nothing: the keys of before
    stay good until it can.
    """

    def __init__(self, folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Read the folder.

        Raises:
            ConfigError: a party has no public key, a file is not a key, or others may write there.
        """
        self._folder = folder
        self._clock = clock
        self._read_at = clock()
        self._keys = {party: _read_public(folder, party) for party in PARTIES}
        self._fault = ""

    def of(self, party: Party) -> tuple[PublicKey, ...]:
        """See ``core.channel_keys.PublicKeys``."""
        now = self._clock()
        if now - self._read_at >= RELOAD_INTERVAL_S:
            self._read_at = now
            self._reload()
        return self._keys[party]

    def _reload(self) -> None:
        try:
            keys = {party: _read_public(self._folder, party) for party in PARTIES}
        except (ConfigError, OSError) as error:
            if str(error) != self._fault:
                log.warning("event=keys_not_reloaded reason=%s", error)
            self._fault = str(error)
            return
        self._fault = ""
        if keys != self._keys:
            counts = ",".join(f"{party}:{len(keys[party])}" for party in PARTIES)
            log.info("event=keys_reloaded folder=%s counts=%s", self._folder, counts)
        self._keys = keys


def load_keys(folder: Path, party: Party) -> ChannelKeys:
    """Return the keys of a process of ``party``.

    Raises:
        ConfigError: a file is missing, is no key, may be read by everybody or written by others, or
            does not belong to the others. Names the file and the fix, and never a secret.
    """
    public = PublicKeyFolder(folder)
    path = folder / f"{party}.key"
    own = _read_secret(path)
    if own.public not in public.of(party):
        raise ConfigError(
            f"{FIELD}: {path} belongs to no {party}*.pub in the folder, so nobody would admit it; "
            f"put its public key {own.public.decode()} into {party}-new.pub, everywhere"
        )
    return ChannelKeys(party, own, public)


def write_keys(folder: Path) -> list[Path]:
    """Write fresh random keys for every party into ``folder``, and return the files.

    Raises:
        ConfigError: there is one already, or the folder cannot be written to.
    """
    keys = DeploymentKeys.generate()
    written: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for party in PARTIES:
            for suffix, key, mode in (
                ("key", keys.pairs[party].secret, 0o600),
                ("pub", keys.pairs[party].public, 0o644),
            ):
                path = folder / f"{party}.{suffix}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                with os.fdopen(os.open(path, flags, mode), "wb") as file:
                    file.write(key + b"\n")
                written.append(path)
    except FileExistsError as error:
        for path in written:
            path.unlink()
        raise ConfigError(
            f"{error.filename} exists and is not overwritten; name an empty folder"
        ) from error
    except OSError as error:
        raise ConfigError(f"cannot write keys into {folder}: {error.strerror}") from error
    return written


def _read_public(folder: Path, party: Party) -> tuple[PublicKey, ...]:
    first = folder / f"{party}.pub"
    others = sorted(folder.glob(f"{party}-*.pub"))
    paths = [path for path in (first, *others) if path.is_file()]
    if not paths:
        raise ConfigError(f"{FIELD}: {first} is missing; {WHOLE_SET}")
    for path in (folder, *paths):
        _check_unwritable(path)
    # Newest first: a client tries them in this order.
    return tuple(dict.fromkeys(_read_key(path) for path in reversed(paths)))


def _read_secret(path: Path) -> KeyPair:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise ConfigError(f"{FIELD}: {path}: {error.strerror}; {WHOLE_SET}") from error
    if mode & 0o007:
        raise ConfigError(
            f"{FIELD}: everybody on this machine can use {path} (mode {mode & 0o777:04o}); "
            "chmod 600 it, or set defaultMode: 0440 on the Kubernetes volume"
        )
    return KeyPair.of_secret(_read_key(path))


def _check_unwritable(path: Path) -> None:
    """Refuse what others may write: whoever adds a public key admits himself.

    A read-only mount is taken as it is: Kubernetes mounts secrets with the mode 1777.
    """
    try:
        mode = path.stat().st_mode
        is_read_only = bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError as error:
        raise ConfigError(f"{FIELD}: {path}: {error.strerror}") from error
    if mode & 0o022 and not is_read_only:
        raise ConfigError(
            f"{FIELD}: others than its owner can write {path} (mode {mode & 0o777:04o}), and so "
            f"admit whom they like; chmod go-w {path}, after looking at what is in it"
        )


def _read_key(path: Path) -> bytes:
    try:
        text = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{FIELD}: {path}: {error.strerror}") from error
    try:
        if len(text) == KEY_NCHARS:
            zmq.curve_public(text)  # of a public key it means nothing, but it is decoded alike
            return text
    except (zmq.ZMQError, ValueError):
        pass
    raise ConfigError(
        f"{FIELD}: {path} is not a key: it must hold {KEY_NCHARS} characters of Z85 and nothing "
        "else; 'sluice keys DIR' makes such files"
    )
