"""A folder of keys must be complete, private and replaceable, or say what is wrong with it.

A key that others can read is no key; one that cannot be replaced while the fleet runs is never
replaced; and an error that quotes a secret has given it away.
"""

import logging
import os
import re
from pathlib import Path

import pytest

from core.channel_keys import ADMITTED_BY, PARTIES, KeyPair
from core.errors import ConfigError
from core.key_files import RELOAD_INTERVAL_S, PublicKeyFolder, load_keys, write_keys
from core.messages import Party
from deploy.cli.parser import run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole folder of keys."""
    write_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_keys_that_were_written_are_loaded_and_know_each_other(folder: Path) -> None:
    keys = {party: load_keys(folder, party) for party in PARTIES}
    for server in PARTIES:
        admitted = {party for party in PARTIES if keys[server].admits(keys[party].own.public)}
        assert admitted == set(ADMITTED_BY[server])


def test_secret_files_are_private_from_the_first_moment(folder: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert {name for name, mode in modes.items() if mode & 0o077} == {f"{p}.pub" for p in PARTIES}


def test_command_makes_a_folder_and_never_overwrites_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["keys", str(tmp_path / "keys")]) == 0
    made = set((tmp_path / "keys").iterdir())
    assert set(map(Path, capsys.readouterr().out.split())) == made
    (tmp_path / "keys" / "router.key").unlink()
    before = {path: path.read_bytes() for path in (tmp_path / "keys").iterdir()}
    assert run(["keys", str(tmp_path / "keys")]) == 2
    assert "router.pub exists" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (tmp_path / "keys").iterdir()} == before


def test_folder_mounted_from_a_secret_is_read_through_its_links(
    folder: Path, tmp_path: Path
) -> None:
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (mounted / "..data").symlink_to(folder)
    for path in folder.iterdir():
        (mounted / path.name).symlink_to(Path("..data") / path.name)
    assert load_keys(mounted, "decode").own == load_keys(folder, "decode").own


def test_a_process_needs_no_secret_but_its_own(folder: Path) -> None:
    for name in ("router.key", "prefill.key"):
        (folder / name).unlink()
    assert load_keys(folder, "decode").admits(load_keys(folder, "decode").own.public) is None


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o606])
def test_secret_that_everybody_can_use_is_refused_with_the_fix(folder: Path, mode: int) -> None:
    (folder / "decode.key").chmod(mode)
    with pytest.raises(ConfigError, match=r"decode\.key \(mode 06.*chmod 600.*defaultMode: 0440"):
        load_keys(folder, "decode")
    (folder / "decode.key").chmod(0o640)
    load_keys(folder, "decode")


@pytest.mark.parametrize(
    ("name", "mode"), [("", 0o770), ("", 0o703), ("", 0o1777), ("router.pub", 0o664)]
)
def test_what_others_could_add_or_change_keys_in_is_refused_with_the_fix(
    folder: Path, name: str, mode: int
) -> None:
    (folder / name).chmod(mode)
    with pytest.raises(ConfigError, match=rf"security\.keys_dir: .*chmod go-w {folder / name}"):
        load_keys(folder, "decode")
    (folder / name).chmod(mode & ~0o022)
    load_keys(folder, "decode")


def test_a_mount_that_nobody_can_write_is_taken_with_any_mode(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.chmod(0o1777)
    statvfs = os.statvfs(folder)

    class ReadOnly:
        f_flag = statvfs.f_flag | os.ST_RDONLY

    monkeypatch.setattr(os, "statvfs", lambda _path: ReadOnly())
    load_keys(folder, "decode")


def test_a_folder_that_becomes_writable_admits_nobody_new(folder: Path) -> None:
    clock = Clock()
    public = PublicKeyFolder(folder, clock=clock)
    before = public.of("decode")
    folder.chmod(0o777)
    (folder / "decode-evil.pub").write_bytes(KeyPair.generate().public)
    clock.now += RELOAD_INTERVAL_S
    assert public.of("decode") == before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("decode.key", None, r"decode\.key: No such file.*copy it from another.*sluice keys DIR"),
        ("decode.key", b"", r"decode\.key is not a key: it must hold 40 characters"),
        ("decode.key", b"\xff" * 40, r"decode\.key is not a key"),
        ("decode.key", b"#" * 40, r"decode\.key is not a key"),
        (
            "prefill.pub",
            None,
            r"prefill\.pub is missing.*copy it from another machine.*sluice keys DIR",
        ),
        ("prefill.pub", b"x" * 41, r"prefill\.pub is not a key"),
    ],
)
def test_file_that_is_no_key_is_named_with_the_fix(
    folder: Path, name: str, content: bytes | None, message: str
) -> None:
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"security.keys_dir: .*{message}"):
        load_keys(folder, "decode")


def test_secret_that_nobody_would_admit_is_refused_with_its_public_key(folder: Path) -> None:
    pair = KeyPair.generate()
    (folder / "decode.key").write_bytes(pair.secret)
    with pytest.raises(ConfigError, match="belongs to no decode") as caught:
        load_keys(folder, "decode")
    assert pair.public.decode() in str(caught.value)
    assert pair.secret.decode() not in str(caught.value)


def test_no_secret_is_in_a_representation(folder: Path) -> None:
    keys = load_keys(folder, "decode")
    shown = repr(keys) + repr(keys.own) + str(keys)
    assert keys.own.public.decode() in shown.replace("\\\\", "\\")
    assert keys.own.secret.decode() not in shown


# Rotation


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_second_key_is_admitted_beside_the_first_without_a_restart(folder: Path) -> None:
    clock = Clock()
    public = PublicKeyFolder(folder, clock=clock)
    (first,) = public.of("decode")
    new = KeyPair.generate().public
    (folder / "decode-2.pub").write_bytes(new + b"\n")
    assert public.of("decode") == (first,)
    clock.now += RELOAD_INTERVAL_S
    assert public.of("decode") == (new, first)
    # And the first one goes when its file does
    (folder / "decode.pub").unlink()
    clock.now += RELOAD_INTERVAL_S
    assert public.of("decode") == (new,)


def test_folder_that_cannot_be_read_any_more_changes_nothing_and_is_told_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    public = PublicKeyFolder(folder, clock=clock)
    before = {party: public.of(party) for party in PARTIES}
    (folder / "router.pub").write_bytes(b"half a k")
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            clock.now += RELOAD_INTERVAL_S
            assert {party: public.of(party) for party in PARTIES} == before
    assert len(re.findall("event=keys_not_reloaded", caplog.text)) == 1


def test_folder_that_may_not_be_read_any_more_changes_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that left the look-up would end whoever asks for admission, for good."""
    clock = Clock()
    public = PublicKeyFolder(folder, clock=clock)
    before = public.of("decode")

    def deny(_path: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", deny)
    clock.now += RELOAD_INTERVAL_S
    assert public.of("decode") == before


@pytest.mark.parametrize("party", PARTIES)
def test_keys_of_one_party_are_not_taken_for_anothers(folder: Path, party: Party) -> None:
    public = PublicKeyFolder(folder)
    assert len({key for other in PARTIES for key in public.of(other)}) == len(PARTIES)
    assert public.of(party) == ((folder / f"{party}.pub").read_bytes().strip(),)
