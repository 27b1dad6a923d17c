"""No key, password or other variable of the environment ends up in a file or on the screen."""

from __future__ import annotations

import base64
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import pytest

from scripts import report, reproduce
from tests.support.driver import BackgroundRun, background_run, here, only_run, steps_logged, summary, wait_until
from trainer.learner import Learner

RUN = ("training.max_steps=3", "cluster.workers=2", "training.checkpoint_every=1", "training.eval_examples=32")
OFFLINE = ("logger=wandb", "logger.mode=offline", "logger.timeout=5")
# Made up; each can be found only where it was copied to.
SECRETS = {
    "WANDB_API_KEY": "5ecre7f00dbadc0ffee05ecre7f00dbadc0ffee0",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMI/K7MDENG/bPxRfiCYZEXAMPLEKEY",
    "HF_TOKEN": "hf_QmVyeVNlY3JldFRva2VuT2ZOb2JvZHk",
    "DATABASE_URL": "postgres://user:correct-horse-battery@db.example/x",
    "SOME_VARIABLE": "nothing secret, but it tells of a dump of all variables",
}
NETRC_PASSWORD = "ab1e5afe" * 5
REMOTE_TOKEN = "ghp-remote-url-token-0123"


def disguises(secret: str) -> set[bytes]:
    """The secret as it may be written: plain, in a URL, in hexadecimal, in base64 at any offset."""
    plain = secret.encode()
    # The first and the last characters of base64 depend on what stands around.
    coded = {base64.b64encode(bytes(offset) + plain)[4 if offset else 0 : -4] for offset in range(3)}
    return {plain, quote(secret, safe="").encode(), plain.hex().encode(), *coded}


def leaks(folder: Path) -> list[str]:
    """The files below a folder that hold a secret, or have one in their names."""
    wanted = {form for secret in (*SECRETS.values(), NETRC_PASSWORD, REMOTE_TOKEN) for form in disguises(secret)}
    found = []
    for path in sorted(folder.rglob("*")):
        content = os.fsencode(path) + (path.read_bytes() if path.is_file() else b"")
        found += [f"{path}: {form!r}" for form in wanted if form in content]
    return found


def make_repository(folder: Path) -> None:
    """A clone whose origin has a token in its address, as services suggest it for machines."""
    origin = f"https://{REMOTE_TOKEN}:x-oauth-basic@git.example/repository.git"
    author = ("-c", "user.name=somebody", "-c", "user.email=somebody@example.org")
    for words in (
        ("init", "-q"),
        ("remote", "add", "origin", origin),
        (*author, "commit", "-q", "--allow-empty", "-mx"),
    ):
        subprocess.run(["git", "-C", str(folder), *words], timeout=30, check=True)


@pytest.fixture
def place(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for all that is written, with an empty home in it; the secrets are around, but not in there."""
    hidden = tmp_path_factory.mktemp("hidden")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    netrc = hidden / "netrc"
    netrc.write_text(f"machine api.wandb.ai\n  login user\n  password {NETRC_PASSWORD}\n")
    netrc.chmod(0o600)
    (hidden / "repository").mkdir()
    make_repository(hidden / "repository")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("WANDB_GIT_ROOT", str(hidden / "repository"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SPARDL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    for name in ("home", "cache", "tmp"):
        (tmp_path / name).mkdir()
    yield tmp_path
    assert leaks(tmp_path) == []


@pytest.mark.parametrize("name", [*SECRETS])
@pytest.mark.parametrize("offset", range(3))
def test_a_secret_is_found_in_any_form(name: str, offset: int, tmp_path: Path) -> None:
    secret = SECRETS[name].encode()
    for number, form in enumerate([secret, secret.hex().encode(), base64.b64encode(bytes(offset) + secret + b"\n")]):
        (tmp_path / str(number)).write_bytes(b"before" + form + b"after")
    assert {line.split(":")[0] for line in leaks(tmp_path)} == {str(tmp_path / str(number)) for number in range(3)}


def run_here(place: Path, *words: str, before: Callable[[], None] = lambda: None) -> BackgroundRun:
    with background_run(*RUN, *words, f"output_dir={place / 'out'}", folder=place / "log", before=before) as run:
        run.wait()
    return run


def breaking() -> None:
    """Lets every worker fail with a traceback, in which variables of the environment are at hand."""

    def broken(learner: Learner, number: int) -> object:
        environment = dict(os.environ)
        raise LookupError(f"{len(environment)} variables")

    Learner.step = broken  # type: ignore[method-assign, assignment]


def test_a_run_that_fails_with_a_traceback(place: Path) -> None:
    run = run_here(place, before=breaking)
    assert "variables (see " in run.stderr
    assert "variables (see " in (only_run(place / "out") / "output.log").read_text()
    assert list(only_run(place / "out").glob("errors/rank-*.txt"))


@pytest.mark.slow
@pytest.mark.parametrize("logger", [OFFLINE, ("logger=wandb", "logger.mode=disabled"), ("logger=none",)])
def test_a_run_that_finishes(logger: tuple[str, ...], place: Path) -> None:
    run = run_here(place, *logger)
    assert summary(only_run(place / "out"))["status"] == "finished", run.stderr
    assert bool(list(place.glob("out/*/wandb/offline-run-*/*.wandb"))) == (logger is OFFLINE)


@pytest.mark.slow
def test_a_run_that_fails_while_it_logs_to_wandb(place: Path) -> None:
    run_here(place, *OFFLINE, before=breaking)
    assert summary(only_run(place / "out"))["status"] == "failed"
    assert list(place.glob("out/*/wandb/offline-run-*/*.wandb"))


@pytest.mark.slow
def test_a_run_whose_server_cannot_be_reached(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    run = run_here(place, "logger=wandb", "logger.timeout=5")
    assert "W&B cannot be reached" in run.stderr
    assert summary(only_run(place / "out"))["status"] == "finished"


@pytest.mark.slow
def test_a_run_that_is_interrupted(place: Path) -> None:
    words = ("training.max_steps=100000", "cluster.workers=2", *OFFLINE, f"output_dir={place / 'out'}")
    with background_run(*words, folder=place / "log") as run:
        wait_until(lambda: steps_logged(place / "out") >= 2 or run.ended())
        run.kill(signal.SIGINT)
        assert run.wait(20) == 130
    assert "\nstopped at step " in (only_run(place / "out") / "output.log").read_text()
    assert summary(only_run(place / "out"))["status"] == "stopped"


@pytest.mark.slow
def test_a_command_that_makes_no_sense(place: Path) -> None:
    run = run_here(place, "model=nonsense")
    assert run.stderr.startswith("error: ")


@pytest.mark.slow
def test_pages_about_runs(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert here(*RUN, "logger=none", f"output_dir={place / 'out'}") == 0
    page = place / "page.html"
    monkeypatch.setattr(sys, "argv", ["report.py", str(place / "out"), "--html", str(page)])
    assert report.main() == 0
    exhibits = ["spardl.complexity", "--outputs", str(place / "outputs"), "--report", str(place / "report")]
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *exhibits])
    assert reproduce.main() == 0
    assert page.stat().st_size > 1000
    assert list((place / "report").rglob("*.html"))
    (place / "screen.txt").write_text("".join(capsys.readouterr()))
